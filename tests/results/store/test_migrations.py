"""The migrations make what the models say, and an upgrade loses nothing."""

import shutil
import sqlite3

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from atma_sweep.results.errors import StoreError, StoreMissing, StoreTooNew
from atma_sweep.results.store import schema
from atma_sweep.results.store.records import CurvePoint, Measurement, Provenance
from atma_sweep.results.store.store import open_store
from atma_sweep.results.store.upgrading import MIGRATIONS, upgrade_store
from atma_sweep.results.studies.optuna_study import Trial
from atma_sweep.results.studies.study_store import StudyWriter
from databases import finished
from sqlalchemy import UniqueConstraint, create_engine, inspect

TABLES = sorted(schema.Base.metadata.tables)


def test_models_and_migrations_agree(store):
    with store.transaction() as session:
        options = {"compare_type": True, "compare_server_default": True, "render_as_batch": True}
        context = MigrationContext.configure(session.connection(), opts=options)
        assert compare_metadata(context, schema.Base.metadata) == []


def test_every_constraint_has_the_name_that_the_models_give_it(store):
    with store.transaction() as session:
        inspector = inspect(session.connection())
        for name, table in schema.Base.metadata.tables.items():
            named = {str(c.name) for c in table.constraints if isinstance(c, UniqueConstraint)}
            assert {unique["name"] for unique in inspector.get_unique_constraints(name)} == named
            checks = {str(c.name) for c in table.constraints if c.__visit_name__ == "table_or_column_check_constraint"}
            checks |= {str(c.name) for c in table.constraints if c.__visit_name__ == "check_constraint"}
            assert {check["name"] for check in inspector.get_check_constraints(name)} == checks
            assert all(key["name"] for key in inspector.get_foreign_keys(name))
            assert inspector.get_pk_constraint(name)["name"] == f"pk_{name}"
        assert "results" in inspector.get_view_names()


def test_the_list_of_revisions_is_that_of_the_files():
    script = ScriptDirectory(str(MIGRATIONS))
    assert tuple(step.revision for step in script.walk_revisions())[::-1] == schema.REVISIONS
    assert script.get_current_head() == schema.HEAD


@pytest.fixture
def populated(tmp_path, cells, owner):
    """A database with rows in every table."""
    path = tmp_path / "test.db"
    store = open_store(path, create=True)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(3))
    store.add_event("note", "hello", sweep="quick")
    StudyWriter(store, "quick", store.acquire_sweep("quick", owner, 60.0)).propose(
        Trial(0, {"a": 1}, cell=cells(1)[0].id), cells(1)[0]
    )
    for cell in cells(3):
        finished(
            store,
            cell,
            provenance=Provenance(config={}, seed=0),
            curve=[CurvePoint(step=s, tokens=s, wall_s=0.0, train_loss=1.0) for s in range(5)],
            measurements=[Measurement(probe="val", metric="val_loss", value=2.0, unit="nats")],
        )
    store.close()
    return path


def content(path):
    connection = sqlite3.connect(path)
    columns = {name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")] for name in TABLES}
    old = {name: [c for c in columns[name] if c != "remark"] for name in TABLES}
    rows_by_table = {}
    for name in TABLES:
        quoted = ", ".join(f'"{column}"' for column in old[name])
        rows_by_table[name] = connection.execute(f"SELECT {quoted} FROM {name}").fetchall()
    connection.close()
    return rows_by_table


def test_nothing_to_do(populated):
    before = content(populated)
    assert upgrade_store(populated) is None
    assert content(populated) == before
    assert sorted(path.name for path in populated.parent.iterdir()) == ["test.db"]


NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9999", "{head}"

def upgrade():
    op.execute("DROP VIEW results")
    with op.batch_alter_table("attempt", recreate="always") as batch:
        batch.add_column(sa.Column("remark", sa.Text(), nullable=False, server_default="none"))
    with op.batch_alter_table("sweep", recreate="always") as batch:
        batch.add_column(sa.Column("remark", sa.Text()))
    {more}
"""


def next_release(tmp_path, more=""):
    folder = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / "9999_next.py").write_text(NEXT.replace("{more}", more).replace("{head}", schema.HEAD))
    return folder


def test_a_populated_database_survives_the_next_release(populated, tmp_path):
    before = content(populated)
    backup = upgrade_store(populated, migrations=next_release(tmp_path), head="9999")
    assert content(populated) == before
    assert content(backup) == before
    assert all(before[name] for name in TABLES if name != "example")
    connection = sqlite3.connect(populated)
    assert connection.execute("SELECT DISTINCT remark FROM attempt").fetchall() == [("none",)]
    indexes = {row[1] for row in connection.execute("PRAGMA index_list(attempt)")}
    assert "one_live_attempt" in indexes
    assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("9999",)]
    with pytest.raises(StoreTooNew):
        open_store(populated)
    with pytest.raises(StoreTooNew, match="upgrade the program"):
        upgrade_store(populated)
    assert open_store(backup).cell_states()[0].state == "done"


@pytest.mark.parametrize(
    "more", ['op.execute("DELETE FROM curve_point WHERE step = 3")', 'op.execute("UPDATE event SET attempt_id = 77")']
)
def test_an_upgrade_that_would_lose_data_is_undone(populated, tmp_path, more):
    before = content(populated)
    with pytest.raises(StoreError, match="would lose data"):
        upgrade_store(populated, migrations=next_release(tmp_path, more), head="9999")
    assert content(populated) == before
    assert open_store(populated).cell_states()[0].state == "done"


def test_an_upgrade_that_the_database_refuses_is_undone(populated, tmp_path):
    before = content(populated)
    with pytest.raises(StoreError, match="failed and was undone: UNIQUE constraint"):
        upgrade_store(
            populated,
            migrations=next_release(tmp_path, 'op.execute("UPDATE measurement SET attempt_id = 1")'),
            head="9999",
        )
    assert content(populated) == before


def test_an_upgrade_that_crashes_is_undone(populated, tmp_path):
    before = content(populated)
    with pytest.raises(ZeroDivisionError):
        upgrade_store(populated, migrations=next_release(tmp_path, "1 / 0"), head="9999")
    assert content(populated) == before
    names = sqlite3.connect(populated).execute("SELECT name FROM sqlite_master WHERE name LIKE '%tmp%'").fetchall()
    assert names == []
    assert open_store(populated).cell_states()[0].state == "done"


def test_nothing_to_upgrade(tmp_path):
    with pytest.raises(StoreMissing):
        upgrade_store(tmp_path / "none.db")
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreMissing):
        upgrade_store(tmp_path / "empty.db")


def test_downgrade_leaves_nothing(tmp_path):
    from alembic import command
    from alembic.config import Config

    open_store(tmp_path / "test.db", create=True).close()
    engine = create_engine(f"sqlite:///{tmp_path / 'test.db'}")
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.begin() as connection:
        config.attributes.update(connection=connection, metadata=schema.Base.metadata)
        command.downgrade(config, "base")
        assert inspect(connection).get_table_names() == ["alembic_version"]
