"""What each template family allows, as the probe says at the start, and turns appended to tokens."""

import pytest

from tests.agents_kit import PARSERS, model_folder
from vime.agents.gateway.render import Template
from vime.data.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=list(PARSERS))
def template(request, tmp_path_factory):
    return request.param, Template(Tokenizer(model_folder(tmp_path_factory.mktemp(request.param), request.param)))


def test_probe_says_what_is_exact(template):
    family, t = template
    print(family, t.report, t.system, t.late_system, t.runs, repr(t.closing))
