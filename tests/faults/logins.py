"""Users of the database with only the rights that they need, as in production."""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Table, make_url

RIGHTS = "SELECT, INSERT, UPDATE, DELETE"


@dataclass(frozen=True)
class Login:
    """A user without rights until they are granted, in one database of a server."""

    kind: str
    name: str
    database: str

    @property
    def _user(self) -> str:
        return self.name if self.kind == "postgresql" else f"'{self.name}'@'%'"

    def create(self) -> list[str]:
        """Statements that make the user; to leave none behind, `drop` them."""
        if self.kind == "postgresql":
            return [f"CREATE ROLE {self.name} LOGIN PASSWORD '{self.name}'"]
        return [f"CREATE USER {self._user} IDENTIFIED BY '{self.name}'"]

    def drop(self) -> list[str]:
        """Statements that remove it, after its database."""
        return [f"DROP {'ROLE' if self.kind == 'postgresql' else 'USER'} IF EXISTS {self._user}"]

    def grants(self, tables: Iterable[Table]) -> list[str]:
        """Statements that allow it to work with each of `tables`."""
        statements = [self.grant(RIGHTS, table.name) for table in tables]
        if self.kind == "postgresql":
            statements.append(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {self.name}")
        return statements

    def grant(self, right: str, table: str) -> str:
        """Give a right."""
        return f"GRANT {right} ON {self._qualified(table)} TO {self._user}"

    def revoke(self, right: str, table: str) -> str:
        """Take it away."""
        return f"REVOKE {right} ON {self._qualified(table)} FROM {self._user}"

    def url(self, url: str) -> str:
        """`url` with this user in the place of another."""
        changed = make_url(url).set(username=self.name, password=self.name)
        return changed.render_as_string(hide_password=False)

    def _qualified(self, table: str) -> str:
        return table if self.kind == "postgresql" else f"{self.database}.{table}"
