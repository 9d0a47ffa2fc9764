"""Fails when a wheel lacks a module, script, YAML file, schema, bundle, template or migration of the checkout, or holds anything else."""

import subprocess
import sys
import zipfile

tracked = set(subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines())
outside = ("tests/", ".ci/", "docs/", "examples/", ".pre-commit")
wanted = {
    f"atma_sweep/{name}"
    for name in tracked
    if not name.startswith(outside)
    and (
        name.endswith((".py", ".typed", ".js", ".jinja", ".csv"))
        or name.startswith(("grids/", "results/paper/", "results/shipped/", "reports/dashboard/templates/"))
    )
}
packed = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if ".dist-info/" not in name}
if wanted != packed:
    sys.exit(f"wheel lacks {sorted(wanted - packed)}, holds besides {sorted(packed - wanted)}")
print(f"wheel holds all {len(packed)} files")
