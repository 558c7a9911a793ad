"""Are two curves the same to within a margin? Two one-sided t-tests (TOST) over seeds, in windows of steps. Arrays in, verdict out.

TOST (Schuirmann 1987, Lakens 2017) sets out from "they differ by the margin or more" and calls the curves equivalent only where both sides of
that are rejected at level alpha. A window gives one number per seed, and only the spread between seeds counts, since the steps of one run hang
together. Every window and every metric must pass (Berger and Hsu 1996), so no correction is due. Why, and what is assumed: docs/parity.md.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vime.errors import VimeError

POWER, MOST = 0.8, 1000  # of `seeds_needed`


@dataclass(frozen=True)
class Verdict:
    """Of `tost`. One entry a window: first and last step (from 1), mean and standard deviation over seeds of a - b, and p, the larger one
    of the two tests'. With one seed spreads are 0 and p is 1."""

    margin: float
    alpha: float
    seeds: int
    windows: list[tuple[int, int]]
    difference: list[float]
    spread: list[float]
    p: list[float]

    @property
    def equivalent(self) -> bool:
        return max(self.p) < self.alpha

    @property
    def half_width(self) -> list[float]:
        """Of each window's 1 - 2 alpha confidence interval; 0 with one seed, which has none."""
        q = t_quantile(self.alpha, self.seeds - 1) if self.seeds > 1 else 0.0
        return [q * s / math.sqrt(self.seeds) for s in self.spread]

    @property
    def needed(self) -> int | None:
        """Seeds that would probably do if the differences and spreads seen are the true ones; None if MOST would not."""
        short = self.equivalent or self.seeds < 2
        return max(self.seeds, 2) if short else seeds_needed(self.difference, self.spread, self.margin, self.alpha)

    def __str__(self) -> str:
        w = max(range(len(self.p)), key=lambda w: (self.p[w], abs(self.difference[w])))
        wide = f" +- {self.half_width[w]:.2g}" if self.seeds > 1 else ""
        seen = f"a - b = {self.difference[w]:.3g}{wide} in steps {self.windows[w][0]} to {self.windows[w][1]}"
        if self.equivalent:
            return f"equivalent within {self.margin:g}: p = {self.p[w]:.2g}, at worst {seen}"
        enough = f"about {self.needed} would be needed" if self.needed else f"{MOST} would not do, the difference is near the margin or beyond it"
        enough = enough if self.seeds > 1 else "2 at least are needed, to see a spread"
        return f"not shown to be equivalent within {self.margin:g}: p = {self.p[w]:.2g}, {seen}, {self.seeds} seed(s); {enough}"


def tost(a: Any, b: Any, margin: float, alpha: float = 0.05, window: int | None = None) -> Verdict:
    """Judge two sets of curves, float [seeds, steps] each, paired by row: row i of both comes from the same seed.

    `margin` > 0, in the metric's unit, is the largest difference that does not matter; choose it before looking. The steps are cut into windows of
    at least `window` steps (default: a quarter of them). Raises: VimeError for what cannot be judged.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or a.ndim != 2 or not a.size or not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise VimeError(f"curves of shapes {a.shape} and {b.shape} cannot be compared", "two equal shapes [seeds, steps] of finite numbers")
    if not (0 < margin < math.inf and 0 < alpha < 0.5 and (window is None or window > 0)):
        raise VimeError(f"margin = {margin}, alpha = {alpha}, window = {window}", "a positive margin, alpha between 0 and 0.5, whole steps")
    n, steps = a.shape
    cuts = np.array_split(np.arange(steps), max(1, steps // (window or math.ceil(steps / 4))))
    each = np.stack([(a - b)[:, c].mean(1) for c in cuts])  # [windows, seeds]
    means, spreads = each.mean(1).tolist(), (each.std(1, ddof=1) if n > 1 else np.zeros(len(cuts))).tolist()

    def p(d: float, s: float) -> float:
        room, error = margin - abs(d), s / math.sqrt(n)  # from the nearer side of the margin, whose p is the larger one
        return 1.0 if n == 1 else t_tail(room / error, n - 1) if error > 0 else float(room <= 0)

    return Verdict(margin, alpha, n, [(int(c[0]) + 1, int(c[-1]) + 1) for c in cuts], means, spreads, list(map(p, means, spreads)))


def seeds_needed(difference: list[float], spread: list[float], margin: float, alpha: float) -> int | None:
    """Seeds with which each window passes with probability POWER or more, if its true difference and spread are these; None: more than MOST.

    The least n with (margin - |difference|) sqrt(n) / spread >= t(1 - alpha) + t(1 - (1 - POWER) / 2), each of n - 1 degrees of freedom
    (Julious 2004, Stat. Med. 23:1921), which is on the safe side where the difference is not 0. A spread taken from few seeds is itself rough.
    """

    def enough(n: int) -> bool:
        q = t_quantile(alpha, n - 1) + t_quantile((1 - POWER) / 2, n - 1)
        return all((margin - abs(d)) * math.sqrt(n) >= s * q for d, s in zip(difference, spread))

    return 2 + bisect_left(range(2, MOST), True, key=enough) if max(map(abs, difference)) < margin and enough(MOST) else None


def t_tail(t: float, df: int) -> float:
    """P(T > t) of Student's t with a whole number of degrees of freedom: the finite sums of Abramowitz and Stegun 1964, 26.7.3 and 26.7.4."""
    angle, odd = math.atan2(t, math.sqrt(df)), df % 2
    term = total = 0.0 if df == 1 else math.cos(angle) if odd else 1.0
    for k in range(2 + odd, df - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    inside = math.sin(angle) * total  # P(-t < T < t), for odd df a part of it
    return max(0.0, (1 - ((angle + inside) * 2 / math.pi if odd else inside)) / 2)


def t_quantile(tail: float, df: int) -> float:
    """The t > 0 that is exceeded with probability `tail` < 0.5, by bisection."""
    low, high = 0.0, 1.0
    while t_tail(high, df) > tail:
        low, high = high, 2 * high
    for _ in range(50):
        mid = (low + high) / 2
        low, high = (mid, high) if t_tail(mid, df) > tail else (low, mid)
    return high


def draw(path: Path, curves: dict[str, tuple[Any, Any, Verdict]], names: tuple[str, str]) -> None:
    """Of each metric: both curves, [seeds, steps], with bands of one standard deviation over seeds; and the windows' differences with
    their confidence intervals against the margin."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(curves), 6.5), dpi=110, layout="constrained")
    grid = figure.subplots(2, len(curves), squeeze=False, sharex=True, height_ratios=[3, 2])
    for (metric, (a, b, v)), (top, low) in zip(curves.items(), grid.T):
        for values, name in zip((a, b), names):
            mean, sd, x = values.mean(0), values.std(0, ddof=min(1, v.seeds - 1)), range(1, values.shape[1] + 1)
            (line,) = top.plot(x, mean, label=name)
            top.fill_between(x, mean - sd, mean + sd, color=line.get_color(), alpha=0.2, lw=0)
        top.set_title(f"{metric}: {'equivalent' if v.equivalent else 'not shown to be equivalent'}, p = {max(v.p):.2g}", fontsize=10)
        top.legend(title=f"mean of {v.seeds} seed(s), band: +- sd", fontsize=8, title_fontsize=8)
        low.axhspan(-v.margin, v.margin, color="tab:green", alpha=0.15)
        middle, reach = [(f + t) / 2 for f, t in v.windows], [(t - f) / 2 for f, t in v.windows]
        low.errorbar(middle, v.difference, v.half_width, reach, "o", color="black", capsize=3)
        for at, d, half, p in zip(middle, v.difference, v.half_width, v.p):
            low.annotate(f"p = {p:.2g}", (at, d + half), (0, 4), textcoords="offset points", ha="center", fontsize=8)
        low.set(xlabel="step", ylabel=f"a - b, {1 - 2 * v.alpha:.0%} interval\n(green: margin {v.margin:g})")
        low.margins(y=0.2)
    figure.savefig(path)
