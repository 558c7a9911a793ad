"""A web browser: Playwright drives the host's Chromium, which reaches nothing but the hosts and the one folder it is given."""

from shutil import which
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, Field

from vime.agents.tools import Context, Observation, Tool, clipped


class Browser(Tool):
    """`hosts`: the names it may reach ("127.0.0.1:8080", "example.org"); `files`: the folder whose file:// URLs it may open."""

    name = "browser"
    description = "Use a web browser. Gives the page's address, title and accessibility tree, and a screenshot."
    timeout_s, needs = 30, ("playwright", "chromium")

    def __init__(self, hosts: list[str] | None = None, files: str | None = None, width: int = 1024, height: int = 768, max_chars: int = 8_000):
        self.hosts, self.files, self.size, self.max_chars = hosts or [], files, (width, height), max_chars

    class Args(BaseModel):
        action: Literal["goto", "click", "type", "press", "scroll", "back", "look"]
        url: str = ""
        target: str = Field("", description="of click and type: a CSS selector, or text=...")
        text: str = Field("", description="of type: what to fill in; of press: a key, as Enter")
        x: float | None = Field(None, description="of click: pixels from the left, in place of a target")
        y: float | None = None
        dy: float = Field(400, description="of scroll: pixels down")

    async def run(self, args: Args, ctx: Context) -> Observation:
        page = ctx.state.get("page") or await self._open(ctx)
        if args.action == "goto" and not self.allows(args.url):  # Chromium's own pages don't pass the route
            raise ValueError(f"{args.url}: not one of the hosts or files this browser may open")
        match args.action:
            case "goto":
                await page.goto(args.url)
            case "click" if args.x is not None and args.y is not None:
                await page.mouse.click(args.x, args.y)
            case "click":
                await page.click(args.target, timeout=5000)
            case "type":
                await page.fill(args.target, args.text, timeout=5000)
            case "press":
                await page.keyboard.press(args.text)
            case "scroll":
                await page.mouse.wheel(0, args.dy)
            case "back":
                await page.go_back()
        if not self.allows(page.url) and not page.url.startswith("chrome-error:"):  # a link or a script led there
            left = page.url
            await page.goto("about:blank")
            raise ValueError(f"{left}: not one of the hosts or files this browser may open")
        text, cut = clipped(f"{page.url}\n{await page.title()}\n{await page.locator('body').aria_snapshot()}", self.max_chars)
        return Observation(text, [await page.screenshot()], truncated=cut)

    def allows(self, url: str) -> bool:
        at = urlsplit(url)
        if at.scheme == "file":
            inside = unquote(at.path)
            return bool(self.files) and ".." not in inside.split("/") and inside.startswith(f"{self.files.rstrip('/')}/")  # type: ignore[union-attr]
        return at.scheme in ("data", "blob", "about") or at.netloc in self.hosts or (at.hostname in self.hosts)

    async def _open(self, ctx: Context) -> Any:
        from playwright.async_api import async_playwright

        # redirects and WebSockets don't pass the route below: for these no other host, or port of one that is named with it, has an address
        known = "".join(f"MAP {h} {h}, " for h in self.hosts)
        flags = ["--no-sandbox", "--disable-gpu", f"--host-resolver-rules={known}MAP * ~NOTFOUND"]
        driver = await ctx.enter_async_context(async_playwright())
        chromium = await driver.chromium.launch(executable_path=which("chromium"), args=flags)
        ctx.push_async_callback(chromium.close)
        page = await chromium.new_page(viewport={"width": self.size[0], "height": self.size[1]}, service_workers="block")
        await page.context.route("**/*", lambda r: r.continue_() if self.allows(r.request.url) else r.abort())
        ctx.state["page"] = page
        return page
