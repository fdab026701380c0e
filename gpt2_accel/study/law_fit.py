"""Fits L(N, D) = E + A/N^alpha + B/D^beta to runs, with bootstrap intervals.

For each (alpha, beta) the best E, A, B >= 0 are a linear problem; the search over (alpha, beta) is that of Levenberg and
Marquardt on what this leaves (variable projection, with the Jacobian of Kaufman, 1975). Parabolas through runs of equal
FLOPs would be biased even without noise (arXiv:2603.22339). Many problems are solved at once, in arrays of shape (problems,
runs).
"""

import itertools
import math

import numpy as np

from gpt2_accel.study.intervals import student

STARTS = np.array([*itertools.product((0.2, 0.4, 0.8), repeat=2)])  # of alpha and beta
LEAST, MOST = 0.02, 3.0  # of both
STEPS = 60
SAMPLES = 200
UNKNOWNS = 5  # E, A, alpha, B, beta


def fit(
    N: np.ndarray, D: np.ndarray, losses: np.ndarray, weights: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fits a law to each of several problems.

    N, D: (runs,). losses, weights: (problems, runs). starts, of alpha and beta: (problems, 2). Returns E, A, alpha, B, beta,
    (problems, 5), and the weighted sums of squared residuals, (problems,).
    """
    logs = np.log([N, D])
    centres = logs.mean(1)
    offsets = logs - centres[:, None]  # so that the columns of X are of one size

    def project(theta: np.ndarray) -> tuple[np.ndarray, ...]:
        powers = np.exp(-np.exp(theta)[:, :, None] * offsets)
        X = np.stack([np.ones_like(losses), powers[:, 0], powers[:, 1]], -1)
        c = nonnegative(X, losses, weights)
        residuals = losses - (X @ c[..., None])[..., 0]
        return X, c, residuals, (weights * residuals**2).sum(-1)

    theta, damping = np.log(starts), np.full(len(starts), 1e-2)
    X, c, residuals, squares = state = project(theta)
    for _ in range(STEPS):
        # The slopes of the residuals over log alpha and log beta, (problems, runs, 2), without what the columns of X in use
        # explain: one whose coefficient is held at 0 explains nothing.
        slopes = c[:, None, 1:] * X[..., 1:] * np.exp(theta)[:, None] * offsets.T
        used = X * (c[:, None] > 0)
        weighted = used * weights[..., None]
        slopes -= used @ solve(weighted.mT @ used, weighted.mT @ slopes)
        H = slopes.mT @ (slopes * weights[..., None])
        gradient = slopes.mT @ (weights * residuals)[..., None]
        scale = np.maximum(np.diagonal(H, axis1=1, axis2=2), 1e-14)
        step = solve(H + (damping[:, None] * scale)[..., None] * np.eye(2), gradient)[..., 0]
        trial = np.clip(theta - np.clip(step, -1, 1), math.log(LEAST), math.log(MOST))
        found = project(trial)
        better = found[-1] < squares
        for old, new in zip((theta, *state), (trial, *found), strict=True):
            old[better] = new[better]
        damping = np.clip(np.where(better, damping / 4, damping * 5), 1e-9, 1e9)
    exponents = np.exp(theta)
    A, B = (c[:, 1:] * np.exp(exponents * centres)).T
    return np.stack([c[:, 0], A, exponents[:, 0], B, exponents[:, 1]], -1), squares


def nonnegative(X: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the coefficients >= 0 of weighted least squares, (problems, 3). X: (problems, runs, 3); y, weights: (problems,
    runs)."""
    weighted = (X * weights[..., None]).mT
    G, b = weighted @ X, weighted @ y[..., None]
    found = solve(G, b)[..., 0]
    wrong = np.flatnonzero((found < 0).any(-1))
    lowest = np.full(len(wrong), np.inf)
    for columns in ([0], [1], [2], [0, 1], [0, 2], [1, 2]) if len(wrong) else ():
        part = np.zeros((len(wrong), 3, 1))
        part[:, columns] = solve(G[wrong][:, columns][:, :, columns], b[wrong][:, columns])
        value = (part.mT @ G[wrong] @ part - 2 * part.mT @ b[wrong])[:, 0, 0]
        better = (part[..., 0] >= 0).all(-1) & (value < lowest)
        found[wrong[better]], lowest[better] = part[better, :, 0], value[better]
    return found


def solve(G: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solves symmetric systems, G: (problems, k, k), b: (problems, k, m); a tiny ridge keeps singular ones solvable."""
    ridge = 1e-13 * np.trace(G, axis1=-2, axis2=-1)[:, None, None] * np.eye(G.shape[-1])
    return np.linalg.solve(G + ridge, b)


def fit_law(N: np.ndarray, D: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the law of the lowest sum of squared residuals over all `STARTS`, (5,), and the residuals' standard
    deviation in nats."""
    many = np.tile(losses, (len(STARTS), 1))
    found, squares = fit(N, D, many, np.ones_like(many), STARTS)
    return found[squares.argmin()], math.sqrt(squares.min() / max(1, len(N) - UNKNOWNS))


def bootstrap(
    N: np.ndarray, D: np.ndarray, losses: np.ndarray, budgets: np.ndarray, law: np.ndarray
) -> np.ndarray:
    """Returns laws fitted to samples of the runs, drawn with replacement within each budget, (SAMPLES, 5).

    So few runs vary less in samples than in truth. Each sample's distance to `law`, in E and the logarithms of the others, is
    therefore multiplied by sqrt(n / (n - 5)), for the degrees of freedom, and by Student's quantile over the normal one. The
    2.5% and 97.5% quantiles then cover the true parameters of simulated runs in 95% of cases (tests/study/test_scaling.py).
    """
    random, weights = np.random.default_rng(0), np.zeros((SAMPLES, len(N)))
    for budget in np.unique(budgets):
        own = np.flatnonzero(budgets == budget)
        weights[:, own] = random.multinomial(len(own), np.full(len(own), 1 / len(own)), SAMPLES)
    starts = np.tile(law[[2, 4]], (SAMPLES, 1))
    found, _ = fit(N, D, np.tile(losses, (SAMPLES, 1)), weights, starts)
    free = max(1, len(N) - UNKNOWNS)
    wider = math.sqrt(len(N) / free) * student(free + 1) / student(10**6)
    found, law = in_logs(found), in_logs(law)
    widened = law + wider * (found - law)
    widened[:, 0] = np.maximum(widened[:, 0], 0)
    widened[:, 1:] = np.exp(widened[:, 1:])
    return widened


def in_logs(laws: np.ndarray) -> np.ndarray:
    """Returns laws with E and the logarithms of A, alpha, B and beta, (..., 5)."""
    return np.concatenate([laws[..., :1], np.log(np.maximum(laws[..., 1:], 1e-12))], -1)
