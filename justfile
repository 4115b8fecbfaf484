# Recipes for everything one does twice; `./dev RECIPE` runs them without an installed just.

# Arguments reach the commands as they were given: -k "a or b" stays one.
set positional-arguments

python := ".venv/bin/python"
servers := python + " -m tools.servers run"
durable := "--durable"

[private]
default:
    @just --list

# Make .venv with everything for development; quick when nothing changed
setup:
    @sh tools/setup.sh

# Run the order service: rollbacks, failures, a killed worker (kind: sqlite or postgresql)
demo kind="sqlite": setup
    @{{ if kind == "postgresql" { servers + " --only postgresql --" } else { "" } }} {{ python }} -m docs.examples.demo {{ kind }}

# Run the Email service: debounce, throttle, send, a killed process (kind: sqlite or postgresql; --users 100 and others)
email kind="sqlite" *args: setup
    @{{ if kind == "postgresql" { servers + " --only postgresql --" } else { "" } }} {{ python }} -m docs.examples.email_service {{ kind }} {{ args }}

# A shop with live traffic on SQLite, and its dashboard, on this machine only (--port 8080)
dashboard *args: setup
    @{{ python }} -m docs.examples.dashboard_demo "$@"

# Make the pictures of the dashboard in docs/pictures with Chromium
screenshots: setup
    @SQLBROKER_SCREENSHOTS=docs/pictures {{ python }} -m pytest -q -n 0 tests/http/dashboard/test_browser.py -k every_page

# Run all tests on PostgreSQL, MariaDB, MySQL and SQLite
test *args: setup
    @{{ servers }} -- sh tools/test.sh "$@"

# Run all tests, and keep how long each file takes: later runs begin with the longest
record-times *args: setup
    @SQLBROKER_RECORD_TIMES=1 {{ servers }} -- sh tools/test.sh "$@"

# Run tests while random processes of the run stop for two seconds (STALLED="--seed 1 --every 20")
test-stalled *args: setup
    @{{ python }} -m tools.stalled ${STALLED:-} -- {{ servers }} -- sh tools/test.sh "$@"

# The inner loop, under a minute: unit tests, and the contract on SQLite
test-quick *args: setup
    @sh tools/quick.sh "$@"

# The tests of one module, as tests/MODULES.md has them: just test-of flow/deliver/flush.py
test-of module *args: setup
    @{{ python }} -m tools.module_tests "$@"

# All tests, with coverage (at least 95 %)
test-coverage *args: setup
    @COVERAGE=1 {{ servers }} -- sh tools/test.sh "$@"

# Run the contract suite with psycopg and asyncmy
test-drivers *args: setup
    @SQLBROKER_TEST_DRIVERS=psycopg,asyncmy {{ servers }} -- {{ python }} -m pytest -n 2 tests/contract tests/flow "$@"

# Run Spark's tests with another pyspark, in an environment of its own
test-spark version="4.3.0" *args: setup
    @{{ servers }} -- sh tools/spark.sh "$@"

# Run the tests that FastStream takes part in with another FastStream, in an environment of its own
test-faststream version *args: setup
    @{{ servers }} -- sh tools/faststream.sh "$@"

# Run the tests that FastStream takes part in, the contract and the short pass of faults with FastStream's own pipeline
test-generic *args: setup
    @{{ servers }} -- sh tools/generic.sh "$@"

# Run tests of each extra with the lower bounds of pyproject.toml, in an environment of its own (--light: without Spark and the docs; arguments of pytest replace the tests)
test-oldest *args: setup
    @{{ servers }} -- {{ python }} -m tools.oldest "$@"

# Tests that depend on a version, on other versions of databases, Python and libraries; writes the table of docs/reference/databases.md and the classifiers (an hour; `postgresql-18`: one of them; `-- ARGUMENTS` reach pytest, and nothing is written)
test-versions *args: setup
    @{{ python }} -m tools.versions "$@"

# README's `./dev demo` and `./dev test` in a fresh Debian 13, as root (arguments reach pytest)
test-debian13 *args: setup
    @{{ python }} -m tools.debian13 "$@"

# The fault machine's full matrix: every promise under every fault; writes docs/explanation/reliability.md, keeps histories in build/histories (an hour; --minutes ends it early, --resume goes on)
test-faults *args: setup
    @{{ servers }} -- {{ python }} -m tools.reliability "$@"

# Failovers under load, ten rounds of each (45 minutes); writes its table in docs/explanation/reliability.md, keeps histories in build/histories (--only synchronous --runs 1)
test-failover *args: setup
    @{{ python }} -m tools.reliability --failover --runs 5 --rounds 2 "$@"

# Exports of a lake killed at each step of a commit, while rows come, go and are archived again (kind: postgresql, mariadb or sqlite; --rounds 20 --seed 1)
test-lake-kills kind="postgresql" *args: setup
    @{{ if kind == "sqlite" { "" } else { servers + " --only " + kind + " --" } }} {{ python }} -m tests.spark.kill_rounds {{ kind }} {{ args }}

# Ruff, formatting, layers, and the subjects of new commits
lint: setup
    @{{ python }} -m tools.commits
    @.venv/bin/ruff check .
    @.venv/bin/ruff format --check .
    @.venv/bin/lint-imports --no-cache

# How readable the code is: complexity, lines, comments, words (--rev REV, --list NAME, --check)
measure *args: setup
    @{{ python }} -m tools.measure "$@"

# Mypy, strictly, the documentation's examples too; and what users see, by pyright too (it brings Node.js where there is none)
types: setup
    @{{ python }} -m mypy
    @{{ python }} -m tools.example_types
    @{{ python }} -m pyright

# All that reads the code without running it: `lint` and `types`
static-analysis: lint types

# Build the site into site/; broken links, warnings and an old table of capabilities fail
docs: setup _capabilities
    @NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# The table of capabilities as it must be; that the site can be built shows tests/docs/test_site.py
[private]
_capabilities: setup
    @{{ python }} -m tools.capabilities --check

# Format
fmt: setup
    @.venv/bin/ruff check --fix-only -q .
    @.venv/bin/ruff format .

# Regenerate what is generated from code and tests: golden SQL, migrations, diagram, pictures, tables of the reference and of capabilities, the OpenAPI document
generate: setup
    @{{ python }} -m tools.golden_sql
    @{{ python }} -m tools.render_migrations
    @{{ python }} -m tools.diagram
    @{{ python }} -m tools.picture
    @{{ python }} -m docs.pictures
    @{{ python }} -m tools.reference
    @{{ python }} -m tools.openapi
    @{{ python }} -m tools.attacks
    @{{ python }} -m tools.capabilities
    @{{ python }} -m tools.versions --write
    @{{ python }} -m benchmarks.quotes

# Regenerate the golden SQL in tests/sql
sql: setup
    @{{ python }} -m tools.golden_sql

# Regenerate migrations/*.sql
migrations: setup
    @{{ python }} -m tools.render_migrations

# Everything CI runs
[parallel]
check: test _quietly && _others

# What one process does in the time that the tests leave: they wait for databases and for clocks
[private]
_quietly: setup
    @nice -n 19 {{ just_executable() }} static-analysis _capabilities _install-next-spark

# The rest of it, at the same time
[private]
[parallel]
_others: _next-spark _generic _versions

# What a handler meets, with FastStream's own pipeline: a cheap part of `test-generic`
[private]
_generic: setup
    @sh tools/generic.sh -q -k "not postgresql and not mariadb and not mysql" tests/faststream/test_handlers.py tests/faststream/test_batch.py tests/faststream/test_ack_policies.py tests/faststream/test_transactional.py

# The oldest and the newest PostgreSQL: their plans, and claims
[private]
_versions: setup
    @{{ python }} -m tools.versions postgresql-14 postgresql-18 -- tests/plans/test_jobs.py tests/plans/test_retention.py tests/plans/test_postgresql.py tests/contract/test_claim.py

# Spark's next version, which `_next-spark` then has: it is large
[private]
_install-next-spark: setup
    @sh tools/spark.sh 4.3.0 --version

# What pyspark calls of ours, with its next version: which database it is makes no difference to that
_next-spark: setup
    @{{ servers }} --only postgresql -- sh tools/spark.sh 4.3.0 tests/spark/test_datasource.py tests/spark/test_stream.py -k "not mariadb and not sqlite"

# What we reach of FastStream's dispatch and of the raw driver; writes benchmarks/results (--rounds 5 --messages 60000; --durable: each commit on disk)
bench *args: setup
    @{{ servers }} {{ if args =~ durable { durable } else { "" } }} -- {{ python }} -m benchmarks own "$@"

# The same compared with other brokers, which it installs into environments of their own (--durable)
bench-peers *args: setup
    @{{ servers }} {{ if args =~ durable { durable } else { "" } }} -- {{ python }} -m benchmarks peers "$@"

# With more rows, queues, bytes and processes (--rounds 3; --large: tens of millions of rows, 15 GB)
bench-scale *args: setup
    @{{ servers }} --only postgresql -- {{ python }} -m benchmarks scale "$@"

# 1,000 messages a second while another session holds a snapshot (--seconds 300)
bench-rate *args: setup
    @{{ servers }} --only postgresql -- {{ python }} -m benchmarks rate "$@"

# What transactional=True costs, compared with handlers that have a transaction of their own
bench-effects *args: setup
    @{{ servers }} -- {{ python }} -m benchmarks effects "$@"

# How long a request to another process takes, compared with a plain message there (--rounds 3)
bench-requests *args: setup
    @{{ servers }} -- {{ python }} -m benchmarks requests "$@"

# What metrics and traces cost, a part of `bench` (--rounds 7)
bench-watching *args: setup
    @{{ servers }} --only postgresql -- {{ python }} -m benchmarks watching "$@"

# How long the server needs for each page of the dashboard, as the tables of its page (--rows 1000000 --jobs 20000 --times 9)
bench-pages *args: setup
    @{{ servers }} --only postgresql -- {{ python }} -m benchmarks.pages "$@"

# What is reached under each policy, compared with a plain queue (--check: only tell the targets)
bench-policies *args: setup
    @{{ servers }} -- {{ python }} -m benchmarks policies "$@"

# Every target of the others, quickly (11 minutes; --only consume: a part of it; --durable: each commit on disk); fails if one is missed
bench-check *args: setup
    @{{ servers }} {{ if args =~ durable { durable } else { "" } }} -- {{ python }} -m benchmarks check "$@"

# How fast Spark reads 2 000 000 archived messages, compared with COPY and Spark's defaults, and by one and two executors (--check: only tell the targets)
bench-spark *args: setup
    @{{ servers }} -- {{ python }} -m benchmarks spark "$@"

# The first export of a year's archive on PostgreSQL, compared with a plain copy (--rows 500000 --window day --rounds 3)
bench-export *args: setup
    @{{ servers }} --only postgresql -- {{ python }} -m benchmarks.spark_export "$@"

# This tree compared with REV; the two take turns (--rounds 9 --kinds postgresql,sqlite)
bench-against rev *args: setup
    @{{ python }} -m benchmarks.against "$@"

# Draw and write benchmarks/results/README.md from what the others have measured
bench-report *args: setup
    @{{ python }} -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[bench]"
    @{{ python }} -m benchmarks report "$@"
