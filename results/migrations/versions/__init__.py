"""Migrations, oldest first. Each file stands alone: it never imports the models, which move on."""
