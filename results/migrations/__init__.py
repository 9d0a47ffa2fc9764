"""How the database came to be: alembic's env.py and one file a change under versions/."""
