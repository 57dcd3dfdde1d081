"""Environments in a real browser: Chromium through Playwright, with BrowserGym's ids and actions.

Subclass `Site` to make one of your own; `environment` plays its episodes, `mapping` chooses what an agent
sees.
"""

from dreamgym.envs.browser.site import Found, Site, Visit

__all__ = ["Found", "Site", "Visit"]
