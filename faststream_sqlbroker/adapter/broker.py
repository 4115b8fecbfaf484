"""Base classes of the broker, its routers and their configuration."""

from faststream._internal.broker import BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import ArgsContainer, BrokerRouter, SubscriberRoute
from faststream._internal.configs import BrokerConfig, UnderlyingDriverAnnotations
from faststream._internal.di import FastDependsConfig
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger

__all__ = (
    "ArgsContainer",
    "BrokerConfig",
    "BrokerRouter",
    "BrokerUsecase",
    "DefaultLoggerStorage",
    "FastDependsConfig",
    "Registrator",
    "SubscriberRoute",
    "UnderlyingDriverAnnotations",
    "get_broker_logger",
    "make_logger_state",
)
