"""Codecs, parsers and producers of FastStream."""

from faststream._internal._compat import json_loads
from faststream._internal.basic_types import DecodedMessage
from faststream._internal.endpoint.utils import ParserComposition, process_msg
from faststream._internal.parser import BatchCodecProto, CodecProto, DefaultCodec, ParserProto
from faststream._internal.producer import ProducerProto

__all__ = (
    "BatchCodecProto",
    "CodecProto",
    "DecodedMessage",
    "DefaultCodec",
    "ParserComposition",
    "ParserProto",
    "ProducerProto",
    "json_loads",
    "process_msg",
)
