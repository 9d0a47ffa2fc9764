"""Reference pages of docs/reference, generated from the declarations: settings, parts, metrics, database and failures."""
