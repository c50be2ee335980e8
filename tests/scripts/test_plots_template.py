import subprocess
import sys
from pathlib import Path

import pytest

from scripts import plots_template


def test_dvc_plots_show_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".dvc").mkdir()
    Path(".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    Path("curve.csv").write_text("step,loss\n1,2.5\n2,1.25\n")
    plots_template.run()
    subprocess.run([sys.executable, "-m", "dvc", "plots", "show", "curve.csv"], check=True)
    page = Path("dvc_plots/index.html").read_text()
    assert "1.25" in page
    assert "window.vegaEmbed" in page
    assert "<script src" not in page


def test_outside_a_project_the_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="root folder"):
        plots_template.run()
