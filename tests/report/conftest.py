import pytest
from browser import Browser


@pytest.fixture(scope="session")
def one_browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(one_browser: Browser) -> Browser:
    """A browser whose console has not complained yet."""
    one_browser.complaints.clear()
    return one_browser
