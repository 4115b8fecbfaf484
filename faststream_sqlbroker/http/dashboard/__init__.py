"""Pages for operators, rendered on the server and readable without JavaScript."""

from faststream_sqlbroker.http.dashboard.routes import DashboardRoutes

__all__ = ("DashboardRoutes",)
