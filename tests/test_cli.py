"""The command line: what it writes, and that its errors are one plain line."""

import pytest
import zoo
from typer.testing import CliRunner

import tl_valuealign as va
from tl_valuealign import cli

pytestmark = pytest.mark.bridge


@pytest.fixture
def run(monkeypatch):
    """Invoke the command with a tiny random model in the place of a download."""
    monkeypatch.setattr(
        "tl_valuealign.adapter.load_model", lambda name, **options: zoo.bridge("llama")
    )
    return lambda *arguments: CliRunner().invoke(cli.app, [str(a) for a in arguments])


def test_help_teaches():
    shown = CliRunner().invoke(cli.app, ["--help"])
    assert shown.exit_code == 0
    for word in ("analyze", "demo", "chance"):
        assert word in shown.stdout
    assert "position 0" in CliRunner().invoke(cli.app, ["analyze", "--help"]).stdout


def test_analyze_writes_result_report_and_figures(run, tmp_path):
    done = run("analyze", "tiny", "--out", tmp_path, "--quiet")
    assert done.exit_code == 0, done.output
    result = va.load(tmp_path / "result.safetensors")
    assert result.provenance["model_class"] == "TransformerBridge"
    assert "<html" in (tmp_path / "report.html").read_text()
    pages = {page.stem for page in (tmp_path / "figures").glob("*.html")}
    assert pages == set(va.post_figures(result))
    assert (tmp_path / "figures" / "plotly.min.js").is_file()


def test_further_questions_reach_the_report(run, tmp_path):
    done = run("analyze", "tiny", "--out", tmp_path, "--max-tokens", 200, "--further", "--quiet")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text()
    for name in ("contributions", "identity", "effect-V-embed"):
        assert f"id='figure-{name}'" in page
    assert "Further questions" in page and '"directions":{"Q":{"0,0":[["' in page
    plain = run("analyze", "tiny", "--out", tmp_path / "plain", "--max-tokens", 200, "--quiet")
    assert plain.exit_code == 0
    assert "Further questions" not in (tmp_path / "plain" / "report.html").read_text()


def test_options_reach_the_analysis(run, tmp_path):
    done = run(
        "analyze", "tiny", "--out", tmp_path, "--role", "V", "--threshold", 0.7,
        "--metric", "pooled", "--component", "mlp_out", "--max-tokens", 100, "--skip-first",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    result = va.load(tmp_path / "result.safetensors")
    assert tuple(result.roles) == ("V",)
    assert result.thresholds == (0.7,)
    assert result.metric == "pooled"
    assert "0_mlp_out" in result.sources and "0_attn_out" not in result.sources
    assert result.provenance["n_tokens_read"] == 100
    assert result.provenance["skip_first"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--role", "X"), "Q, K, V, OV"),
        (("--threshold", "1.5"), "(0, 1]"),
        (("--text", "no-such-file.txt"), "no-such-file.txt"),
        (("--max-tokens", "0"), "at least 1"),
    ],
)
def test_a_mistake_is_one_plain_line_and_writes_nothing(run, tmp_path, arguments, words):
    done = run("analyze", "tiny", "--out", tmp_path / "out", *arguments)
    assert done.exit_code == 1
    assert words in done.stderr
    assert "Traceback" not in done.output
    assert not list((tmp_path / "out").glob("*"))


def test_what_exists_is_not_replaced_unasked(run, tmp_path):
    (tmp_path / "report.html").write_text("mine")
    done = run("analyze", "tiny", "--out", tmp_path)
    assert done.exit_code == 1
    assert "--overwrite" in done.stderr
    assert (tmp_path / "report.html").read_text() == "mine"


def test_a_file_in_the_place_of_the_folder(run, tmp_path):
    (tmp_path / "file").write_text("")
    done = run("analyze", "tiny", "--out", tmp_path / "file")
    assert done.exit_code == 1
    assert "folder" in done.stderr
