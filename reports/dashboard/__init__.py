"""The dashboard: one HTML file of a whole sweep."""
