"""The database: schema, store, recorder and migrations."""
