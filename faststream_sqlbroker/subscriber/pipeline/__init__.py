"""FastStream's pipeline between a claimed row and its handler, compiled for each subscriber.

FastStream walks the same way for each message: it asks the configuration, enters its middlewares,
and lets FastDepends find the arguments. Nearly all answers are the same each time. Here they are
found once, when the subscriber starts; a message then takes a straight line. Everything that is
observable stays the same: the context, the order of acks and log lines, errors, answers.

| file | what it does |
|---|---|
| `choice.py` | which pipeline a subscriber has, and why; compiles it anew after a change |
| `fingerprints.py` | whether FastStream's functions are the ones that are replaced here |
| `guard.py` | whether what was found at the start still holds; asked for each message |
| `plain.py` | the way of a message without middlewares |
| `wrapped.py` | the way of a message through the user's middlewares |
| `bodies.py` | makes the message and decodes its body |
| `context.py` | FastStream's context around a message |
| `arguments.py`, `dependencies.py` | the handler's arguments, with those of `Depends` |
| `answers.py` | publishes what a handler returns |
| `acknowledging.py` | acks and logs; what becomes of a message whose handler has failed |
"""
