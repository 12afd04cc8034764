"""How Alembic runs our migrations: on the connection that `services.jobs.migrate` opened."""

from alembic import context

from services.jobs.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
