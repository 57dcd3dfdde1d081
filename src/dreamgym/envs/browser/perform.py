"""Carries out actions on a page of Playwright.

What an element cannot do is refused before anything is done, by looking at the page once: Playwright would
wait for the element until a time limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dreamgym.envs.browser.actions import NOT_AN_ACTION, BrowserAction
from dreamgym.envs.browser.snapshot import ATTRIBUTE

NO_SUCH_ELEMENT = "Invalid action. There is no such element on this page."
NOT_POSSIBLE = "Invalid action. This element does not allow that."
NO_SUCH_FILE = "Invalid action. There is no such file to upload."
REFUSALS = (NOT_AN_ACTION, NO_SUCH_ELEMENT, NOT_POSSIBLE, NO_SUCH_FILE)
_CHECK = """([name, id, verb, values]) => {
  const e = document.querySelector(`[${name}="${id}"]`);
  if (!e) return 'missing';
  const upload = e.tagName === 'INPUT' && e.type === 'file';
  if (verb === 'upload_file') return upload ? 'ok' : 'unable';
  if (!e.getClientRects().length || e.disabled || upload) return 'unable';
  if (verb === 'select_option') {
    if (e.tagName !== 'SELECT' || (values.length > 1 && !e.multiple)) return 'unable';
    const known = [...e.options].filter((o) => !o.disabled).flatMap((o) => [o.value, o.label]);
    return values.every((v) => known.includes(v)) ? 'ok' : 'unable';
  }
  if (verb === 'fill' || verb === 'clear') {
    const kinds = ['text', 'search', 'email', 'url', 'tel', 'password', 'number'];
    const typed = e.tagName === 'TEXTAREA' || (e.tagName === 'INPUT' && kinds.includes(e.type));
    if (!(typed && !e.readOnly) && !e.isContentEditable) return 'unable';
    if (e.type === 'number' && values.length && values[0].trim() && isNaN(Number(values[0]))) return 'unable';
  }
  if (verb === 'click' || verb === 'dblclick') return e.tagName === 'OPTION' ? 'unable' : 'ok';
  return 'ok';
}"""


async def perform(page: Any, action: BrowserAction, *, seconds: float, uploads: Path | None) -> str | None:
    """Carry out an action; the refusal if nothing was done."""
    name, arguments = action.name, action.arguments
    if name == "scroll":
        await page.evaluate("([x, y]) => window.scrollBy(x, y)", list(arguments))
    if not action.elements:
        return None
    values = list(arguments[1]) if name == "select_option" and isinstance(arguments[1], tuple) else []
    values = [str(arguments[1])] if name == "fill" else values
    for number in action.elements:
        verdict = await page.evaluate(_CHECK, [ATTRIBUTE, number, name, values])
        if verdict != "ok":
            return NO_SUCH_ELEMENT if verdict == "missing" else NOT_POSSIBLE
    if name == "upload_file":
        names = arguments[1] if isinstance(arguments[1], tuple) else ()
        files = [_file(uploads, each) for each in names]
        if None in files:
            return NO_SUCH_FILE
        arguments = (arguments[0], tuple(map(str, files)))
    first, *others = [page.locator(f'[{ATTRIBUTE}="{number}"]').first for number in action.elements]
    await _act(first, others, name, arguments[1:], 1000 * seconds)
    return None


async def _act(element: Any, others: list[Any], name: str, rest: tuple[Any, ...], limit: float) -> None:
    if name in ("click", "dblclick"):
        button = rest[0] if rest else "left"
        # `force`: the pointer goes to the middle of the element at once, whatever lies above it.
        await getattr(element, name)(button=button, force=True, timeout=limit)
    elif name == "fill":
        await element.fill(rest[0], force=True, timeout=limit)
    elif name == "clear":
        await element.clear(force=True, timeout=limit)
    elif name == "press":
        await element.press(rest[0], timeout=limit)
    elif name == "select_option":
        await element.select_option(list(rest[0]), force=True, timeout=limit)
    elif name == "upload_file":
        await element.set_input_files(list(rest[0]), timeout=limit)
    elif name == "drag_and_drop":
        await element.drag_to(others[0], force=True, timeout=limit)
    elif name == "hover":
        await element.hover(force=True, timeout=limit)
    elif name == "focus":
        await element.focus(timeout=limit)


def _file(folder: Path | None, name: str) -> Path | None:
    """A file in the folder of the site, by its bare name: an agent must not read other files."""
    if folder is None or not name or Path(name).name != name:
        return None
    found = folder / name
    return found if found.is_file() and not found.is_symlink() else None
