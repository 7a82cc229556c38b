import pytest
from browser import Browser


@pytest.fixture(scope="session")
def one_browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture
def browser(one_browser: Browser) -> Browser:
    """A browser whose console has not complained yet."""
    one_browser.complaints.clear()
    return one_browser
