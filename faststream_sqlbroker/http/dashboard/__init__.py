"""Pages for people who run the broker: rendered here, readable without JavaScript."""

from faststream_sqlbroker.http.dashboard.routes import DashboardRoutes

__all__ = ("DashboardRoutes",)
