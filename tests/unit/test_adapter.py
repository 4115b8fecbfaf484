"""What is used of FastStream's internals: each name, and why; only the adapter imports them."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ADAPTER = ROOT / "faststream_sqlbroker" / "adapter"
INTERNAL = "faststream" + "._internal"

USES = {
    "broker": {
        "ArgsContainer": "keeps a publisher's arguments until a router's broker is known",
        "BrokerConfig": "what a broker shares with its routers, publishers and subscribers",
        "BrokerRouter": "base of SqlBrokerRouter",
        "BrokerUsecase": "base of SqlBroker: middlewares, logger, start and stop of subscribers",
        "DefaultLoggerStorage": "base of the storage of our default logger",
        "FastDependsConfig": "carries apply_types, serializer, provider and context to handlers",
        "Registrator": "base of everything with `subscriber` and `publisher`",
        "SubscriberRoute": "base of SqlBrokerRoute",
        "UnderlyingDriverAnnotations": "type of the argument underlying_driver_annotations",
        "get_broker_logger": "makes a logger with FastStream's columns",
        "make_logger_state": "the logger of a broker's configuration",
    },
    "endpoints": {
        "CallsCollection": "the handlers of a subscriber; ours refuses them with forward_to",
        "FakePublisher": "base of the publisher that sends answers to reply_to",
        "MultiLock": "base of our counter of running handlers, which a stop waits for",
        "PublisherProto": "type of the publishers of an answer",
        "PublisherSpecification": "base of a publisher's part of AsyncAPI documents",
        "PublisherSpecificationConfig": "what that part is made of",
        "PublisherUsecase": "base of QueuePublisher: middlewares of a publish, decorator",
        "PublisherUsecaseConfig": "base of a publisher's configuration",
        "SubscriberSpecification": "base of a subscriber's part of AsyncAPI documents",
        "SubscriberSpecificationConfig": "what that part is made of",
        "SubscriberUsecase": "base of QueueSubscriber: the pipeline of one message",
        "SubscriberUsecaseConfig": "base of a subscriber's configuration",
    },
    "fastapi": {
        "Context": "fills parameters of FastAPI's handlers from FastStream's context",
        "ContextRepo": "annotation of the context itself, for them",
        "Logger": "annotation of the logger, for them",
        "StreamMessage": "annotation of the message as FastAPI's request, for them",
        "StreamRouter": "base of the FastAPI router",
    },
    "messages": {
        "BatchCodecProto": "tells whether a codec decodes whole batches",
        "CodecProto": "type of the argument codec",
        "DecodedMessage": "type of a decoded body",
        "DefaultCodec": "encodes bodies where the user gives no codec",
        "ParserComposition": "puts a user's parser or decoder around ours",
        "ParserProto": "type of SqlBrokerParserType",
        "ProducerProto": "base of SqlBrokerProducer",
        "json_loads": "tells whether FastStream decodes JSON with orjson here",
        "process_msg": "runs the middlewares around a message of get_one",
    },
    "pipeline": {
        "BaseMiddleware": "its methods do nothing: they are left out for each message",
        "ConfigComposition": "read for each message; the guard looks at what it composes",
        "Context": "tells a parameter that comes from the context; base of one without a thread",
        "ContextRepo": "holds the variables that are set around a message",
        "ContextRepoComposition": "the same with an application's context",
        "ContextScope": "sets them in FastStream's pipeline; compiled",
        "EmptyLoggerObject": "tells that log lines go nowhere",
        "HandlerCallWrapper": "calls the handler; compiled",
        "HandlerItem": "makes the message, calls the handler; compiled",
        "LoggerState": "writes FastStream's log lines",
        "SubscriberUsecase": "its process_message is compiled",
        "default_filter": "tells that a handler has no filter of the user's",
        "resolve_context_by_name": "finds what a parameter asks of the context",
    },
    "testing": {
        "BrokerFields": "carries our fields of a call assertion",
        "CallAssertions": "base of the call assertions with our fields",
        "CallRecorder": "gives a nested test a record of its own",
        "EnterType": "type parameter of a test broker",
        "ExpectedCall": "what a call assertion compares",
        "HandlerCallWrapper": "base of handlers with our call assertions",
        "TestBroker": "base of TestSqlBroker: patches, mocks, registration for try-it-out",
    },
    "values": {
        "EMPTY": "default of arguments whose None means something",
        "AsyncCallable": "type of parsers and decoders",
        "BrokerMiddleware": "type of the argument middlewares",
        "CustomCallable": "type of the arguments parser and decoder",
        "IdGenerator": "type of the argument id_generator",
        "LoggerProto": "type of the argument logger",
        "P_HandlerParams": "what a decorated handler takes",
        "PublisherMiddleware": "type of what wraps the publish of an answer",
        "T_HandlerReturn": "what a decorated handler returns",
    },
}


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Modules that `path` imports from, for types too, each with a name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def test_each_internal_name_is_listed_with_its_use() -> None:
    found = {
        path.stem: {name for module, name in imports(path) if module.startswith(INTERNAL)}
        for path in ADAPTER.glob("*.py")
        if path.stem != "__init__"
    }
    assert found == {module: set(names) for module, names in USES.items()}


def test_each_listed_name_is_used() -> None:
    used = {
        (module, name)
        for path in ROOT.joinpath("faststream_sqlbroker").rglob("*.py")
        for module, name in imports(path)
    }
    unused = [
        name
        for module, names in USES.items()
        for name in names
        if (f"faststream_sqlbroker.adapter.{module}", name) not in used
    ]
    assert unused == []


def test_only_the_adapter_knows_the_internals_of_faststream() -> None:
    sources = [
        path
        for folder in ("faststream_sqlbroker", "pyspark_sqlbroker", "tests", "tools", "benchmarks")
        for path in ROOT.joinpath(folder).rglob("*.py")
        if ADAPTER not in path.parents
    ]
    sources += [
        path for ending in ("py", "md") for path in ROOT.joinpath("docs").rglob(f"*.{ending}")
    ]
    assert len(sources) > 300, "the package has moved"
    knowing = [
        path.relative_to(ROOT).as_posix() for path in sources if INTERNAL in path.read_text()
    ]
    assert knowing == []
