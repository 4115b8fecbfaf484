"""FastStream's pipeline between a claimed row and its handler, compiled for each subscriber.

FastStream walks the same way for each message: it asks the configuration, enters its middlewares,
and lets FastDepends find the arguments. Nearly all answers are the same each time. Here they are
found once, when the subscriber starts; a message then takes a straight line. Everything that is
observable stays the same: the context, the order of acks and log lines, errors, answers.

| file | what it does |
|---|---|
| `choice.py` | which pipeline a subscriber has, and why; compiles it anew after a change |
| `replaced.py` | FastStream's functions that are replaced here |
| `fingerprints.py` | whether they are the ones that are known |
| `parts.py` | the way of a message without middlewares, or through the user's |
| `bodies.py` | makes the message and decodes its body |
| `context.py` | FastStream's context around a message |
| `arguments.py`, `models.py` | the handler's arguments |
| `dependencies.py` | those of `Depends` |
| `answers.py` | publishes what a handler returns |
| `acknowledging.py` | acks and logs; what becomes of a message whose handler has failed |
"""
