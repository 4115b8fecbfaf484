"""An app for the FastStream CLI.

faststream run docs.examples.basic_app:app --workers 2
faststream publish docs.examples.basic_app:app '{"name": "Ada"}' --queue greetings
faststream publish docs.examples.basic_app:app '{"name": "Ada"}' --queue greetings --rpc
"""

import os

from faststream import FastStream
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker

engine = create_async_engine(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///basic_app.db"))
broker = SqlBroker(engine)
app = FastStream(broker)


@app.on_startup
async def create_tables() -> None:
    """For development; in production the migrations create them."""
    await broker.create_tables()


@broker.subscriber("greetings")
async def greet(person: dict[str, str]) -> str:
    """Say hello, also to who asked."""
    greeting = f"hello {person['name']}"
    print(greeting, flush=True)
    return greeting
