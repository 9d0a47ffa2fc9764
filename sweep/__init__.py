"""From a grid file to finished cells.

May import model, kernels and results; cli.py and nothing else imports it. Its layers are in docs/layers.toml.
Start at orchestrator/launch.py, which plans with planning/, starts attempts with executors/ and records with results/.
"""
