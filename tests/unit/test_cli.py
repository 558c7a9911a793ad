import pytest

from vime.cli import main, parser


def test_overrides_are_optional_and_may_come_after_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    said = capsys.readouterr().err
    assert "[section.key=value ...]" in said and said.endswith("the following arguments are required: config\n")
    for given in (["train", "r.toml"], ["config"]):
        assert parser().parse_args(given).overrides == []
    for _ in range(2):  # the first call must not leave its overrides behind
        assert main(["train", "no-such.toml", "--dry-run", "a=1"]) == 1
        assert parser().parse_args(["train", "r.toml"]).overrides == []
