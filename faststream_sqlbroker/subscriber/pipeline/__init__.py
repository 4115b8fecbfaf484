"""FastStream's pipeline between a claimed row and its handler, compiled for each subscriber.

FastStream repeats the same steps for each message: it reads the configuration, enters its
middlewares, and lets FastDepends resolve the arguments. Nearly all results are the same each time.
Here they are determined once, when the subscriber starts, and a message takes a short path. All
observable behaviour stays the same: the context, the order of acks and log lines, errors, answers.

| file | purpose |
|---|---|
| `choice.py` | selects a subscriber's pipeline; compiles it again after a change |
| `replaced.py` | lists the functions of FastStream that are replaced here |
| `fingerprints.py` | checks that these functions are known versions |
| `parts.py` | runs a message without middlewares, or through the user's |
| `bodies.py` | creates the message and decodes its body |
| `context.py` | sets FastStream's context around a message |
| `arguments.py`, `dependency_models.py` | build the handler's arguments |
| `dependencies.py` | resolves the values of `Depends` |
| `answers.py` | publishes the result of a handler |
| `acknowledging.py` | acks and logs; handles messages whose handler has failed |
"""
