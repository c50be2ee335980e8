"""Make the pages of `dvc plots show` and `dvc plots diff` work without a network.

DVC's pages load Vega from the internet and stay blank without it. This script writes a page template that contains Vega,
.dvc/plots/offline.html, and sets it in .dvc/config.local. Both are local to the checkout and not kept in git (1 MB).

Example: python -m scripts.plots_template
"""

import subprocess
import sys
from pathlib import Path

import vl_convert

from pipelines.command_line import main
from tap.files import write_atomically

# DVC replaces {plot_divs} by the plots. {scripts}, its links to the internet, is left out on purpose.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TAP plots</title>
{refresh_tag}
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 1rem; display: flex; flex-wrap: wrap; gap: 1.5rem; }
</style>
<script>VEGA</script>
</head>
<body>
{plot_divs}
</body>
</html>
"""


def run() -> None:
    """Write the template and set it in DVC's local config. Raises ValueError outside the root folder of a DVC project."""
    if not Path(".dvc").is_dir():
        raise ValueError(f"{Path.cwd()} has no .dvc folder: run this in the project's root folder")
    write_atomically(
        Path(".dvc/plots/offline.html"), PAGE.replace("VEGA", vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed"))
    )
    # DVC reads this path relative to .dvc.
    command = [sys.executable, "-m", "dvc", "config", "--local", "plots.html_template", "plots/offline.html"]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(run)
