"""A Django project in a process of its own: `python django_shop.py URL`, a synchronous URL.

Prints what became of its orders as JSON.
"""

import json
import sys
import threading
from typing import Any

import django
from django.conf import settings
from sqlalchemy import make_url

URL = make_url(sys.argv[1])
ENGINES = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite3"}
kind = ENGINES[URL.get_backend_name()]
if kind == "mysql":
    import pymysql

    # Django knows mysqlclient only, whose place PyMySQL takes; of which it has the version's form.
    pymysql.version_info = (2, 2, 1, "final", 0)  # type: ignore[assignment]
    pymysql.install_as_MySQLdb()
DATABASE: dict[str, Any] = {
    "ENGINE": f"django.db.backends.{kind}",
    "NAME": URL.database,
    "HOST": URL.host or "",
    "PORT": URL.port or "",
    "USER": URL.username or "",
    "PASSWORD": URL.password or "",
}
if kind == "mysql":
    DATABASE["OPTIONS"] = {"charset": "utf8mb4"}
settings.configure(DATABASES={"default": DATABASE}, INSTALLED_APPS=[], USE_TZ=True)
django.setup()

from django.db import connection, models, transaction  # noqa: E402
from django.db.transaction import TransactionManagementError  # noqa: E402

from faststream_sqlbroker import (  # noqa: E402
    PublishError,
    SqlBrokerResponse,
    SqlProducer,
    StoreError,
)


class Order(models.Model):  # noqa: DJ008 - nothing shows it
    item = models.CharField(max_length=50)

    class Meta:
        app_label = "shop"


producer = SqlProducer(connection)
found: dict[str, Any] = {}


class RefusedError(Exception):
    """The order is not wanted."""


def order(item: str, *, refuse: bool = False) -> Any:
    with transaction.atomic():
        made = Order.objects.create(item=item)
        message_id = producer.publish({"id": made.pk, "item": item}, "orders", dedup_id=item)
        if refuse:
            raise RefusedError
    return message_id


with connection.schema_editor() as editor:
    editor.create_model(Order)

# Committed together, or not at all.
found["first"] = order("tea é") is not None
try:
    order("refused", refuse=True)
except RefusedError:
    found["refused"] = Order.objects.filter(item="refused").exists()

# A savepoint inside a transaction.
with transaction.atomic():
    producer.publish("outer", "orders")
    try:
        with transaction.atomic():
            producer.publish("inner", "orders")
            raise RefusedError
    except RefusedError:
        pass

# A duplicate leaves the transaction usable.
with transaction.atomic():
    found["duplicate"] = producer.publish({}, "orders", dedup_id="tea é")
    Order.objects.create(item="after a duplicate")

# Without a transaction, several statements are one all the same.
ids = producer.publish_batch(
    "a", SqlBrokerResponse("b", dedup_id="b"), SqlBrokerResponse("c", delay=60), queue="batch"
)
found["batch"] = [each is not None for each in ids]
try:
    producer.publish_batch("d", SqlBrokerResponse("e", priority=1_000), queue="batch")
except PublishError:
    found["whole"] = True
found["autocommit"] = connection.get_autocommit()

# Nothing is written into a transaction that Django has given up.
try:
    with transaction.atomic():
        transaction.set_rollback(True)
        producer.publish("lost", "orders")
except TransactionManagementError:
    found["broken"] = True

# Each thread has a connection, and a transaction, of its own.
if kind != "sqlite3":

    def publish() -> None:
        producer.publish("thread", "orders")
        connection.close()

    with transaction.atomic():
        producer.publish("main", "orders")
        thread = threading.Thread(target=publish)
        thread.start()
        thread.join()
        transaction.set_rollback(True)

try:
    producer.publish("x", "orders", connection=object())  # type: ignore[arg-type]
except PublishError as error:
    found["own"] = "Django" in str(error)
try:
    SqlProducer(connection, schema=None).publish("x" * 10, "q" * 300)
except (PublishError, StoreError):
    found["checked"] = True
found["orders"] = sorted(Order.objects.values_list("item", flat=True))
sys.stdout.write(json.dumps(found))
