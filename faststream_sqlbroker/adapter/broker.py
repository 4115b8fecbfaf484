"""Base classes of the broker, its routers and their configuration."""

from faststream._internal.broker import BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import ArgsContainer, BrokerRouter, SubscriberRoute
from faststream._internal.configs import BrokerConfig, UnderlyingDriverAnnotations
from faststream._internal.di import FastDependsConfig

__all__ = (
    "ArgsContainer",
    "BrokerConfig",
    "BrokerRouter",
    "BrokerUsecase",
    "FastDependsConfig",
    "Registrator",
    "SubscriberRoute",
    "UnderlyingDriverAnnotations",
)
