"""Policy losses and their gradients equal the reference implementation's, masked slots hold NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.losses.heads import policy_loss_fn
from jaxfb.losses.policy import PolicyLoss
from jaxfb.losses.surrogates import make_surrogate
from jaxfb.types import Pipelined, Unembedding

# the reference's name -> (ours, how its settings are called here)
_CLIP = {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high"}
NAMES = {
    "vanilla": ("ppo", _CLIP | {"clip_ratio_c": "dual_clip"}),
    "gspo": ("gspo", _CLIP),
    "cispo": ("cispo", _CLIP),
    "gpg": ("gpg", {}),
    "sapo": ("sapo", {"tau_pos": "tau_pos", "tau_neg": "tau_neg"}),
    "geo_mean": ("geo_mean", _CLIP),
    "dppo_tv": ("dppo", {"clip_ratio_low": "low", "clip_ratio_high": "high", "clip_ratio_c": "truncation"}),
    "dppo_kl": ("dppo", {"clip_ratio_low": "low", "clip_ratio_high": "high", "clip_ratio_c": "truncation"}),
    "dro": ("dro", {"dro_beta": "beta"}),
}


def _cases(golden, name):
    return [c for c in golden("rl_policy_losses.json")["cases"] if c["inputs"].get("policy_loss") == name]


def _objective(given):
    name, renamed = NAMES[given["policy_loss"]]
    settings = {ours: given["settings"][theirs] for theirs, ours in renamed.items()}
    if name == "dppo":
        settings["divergence"] = given["policy_loss"].removeprefix("dppo_")
    forced = name in ("gspo", "sapo", "geo_mean")  # the reference aggregates these its own way
    mode = None if forced else given["mode"]
    scale = (given["global_info"].get("loss_scale_factor") or 4) if mode and mode.endswith("norm") else None
    return PolicyLoss(make_surrogate(name, **settings), mode, scale=scale)


def _microbatch(given):
    mask = np.array(given["mask"])
    leaves = {"old_log_probs": given["old_log_prob"], "advantages": given["advantages"]}
    if given["rollout_is_weights"]:
        leaves["rollout_weights"] = given["rollout_is_weights"]
    poisoned = {name: jnp.array(np.where(mask == 0, np.nan, leaf)) for name, leaf in leaves.items()}
    return {"loss_mask": jnp.array(mask)} | poisoned


def _denominator_ratio(given):
    """The reference's denominator, which may be configured, over ours, which is counted."""
    info, mask = given["global_info"], np.array(given["mask"])
    if given["policy_loss"] == "geo_mean":
        return 1 if (mask.sum(1) > 0).all() else len(mask) / (mask.sum(1) > 0).sum()
    if "batch_num_tokens" not in info or given["mode"] == "token-sum":
        return 1
    if given["mode"] == "token-mean":
        return info["batch_num_tokens"] / mask.sum()
    return info["global_batch_size"] / (mask.sum(1) > 0).sum()


@pytest.mark.parametrize("name", NAMES)
def test_values_gradients_and_metrics_are_the_references(golden, name):
    cases = _cases(golden, name)
    assert cases
    for case in cases:
        given, expected = case["inputs"], case["expected"]
        loss, microbatch = _objective(given), _microbatch(given)

        def value(log_probs, loss=loss, microbatch=microbatch):
            out = loss(log_probs, jnp.zeros_like(log_probs), microbatch)
            return out.terms["policy"].value, out.metrics

        (ours, metrics), grad = jax.value_and_grad(value, has_aux=True)(jnp.array(given["log_prob"]))
        ratio = _denominator_ratio(given)
        # the reference adds 1e-8 to the number of tokens of a row
        close = {"rtol": 3e-8, "atol": 1e-12, "err_msg": case["name"]}
        np.testing.assert_allclose(ours / ratio, expected["loss"], **close)
        np.testing.assert_allclose(grad / ratio, expected["grad_log_prob"], **close)
        if name in ("vanilla", "gspo", "dppo_tv", "dppo_kl", "geo_mean"):
            np.testing.assert_allclose(
                metrics["clip_fraction"].value, expected["metrics"]["pg_clipfrac"], **close
            )
        lower = {"vanilla": "dual_clip_fraction", "geo_mean": "clip_fraction_lower"}
        if name in lower:
            np.testing.assert_allclose(
                metrics[lower[name]].value, expected["metrics"]["pg_clipfrac_lower"], **close
            )


def test_truncated_tokens_are_those_that_count_with_less_than_their_ratio():
    """Of four: not truncated; truncated; truncated, but not allowed; neither."""
    old = jnp.log(jnp.array([[0.2, 0.01, 0.01, 0.01]]))
    advantages = jnp.array([[1.0, -1, 1, 1]])
    leaves = {"loss_mask": jnp.ones((1, 4)), "old_log_probs": old, "advantages": advantages}
    loss = PolicyLoss(make_surrogate("dppo", low=0.5, high=0.15, truncation=5.0))
    metrics = loss(jnp.log(jnp.array([[0.3, 0.3, 0.3, 0.02]])), jnp.zeros((1, 4)), leaves).metrics
    np.testing.assert_allclose(metrics["truncated_fraction"].value, 0.25)
    np.testing.assert_allclose(metrics["clip_fraction"].value, 0.25)


def test_a_token_that_was_certain_has_a_finite_divergence():
    """Its KL is -log p: 0.01 of the first is allowed, 0.7 of the second is not."""
    leaves = {
        "loss_mask": jnp.ones((1, 2)),
        "old_log_probs": jnp.zeros((1, 2)),
        "advantages": -jnp.ones((1, 2)),
    }
    loss = PolicyLoss(make_surrogate("dppo", divergence="kl", low=0.1))
    metrics = loss(jnp.array([[-0.01, -0.7]]), jnp.zeros((1, 2)), leaves).metrics
    np.testing.assert_allclose(metrics["clip_fraction"].value, 0.5)


def test_entropy_and_kl_are_terms_of_their_own():
    mask = jnp.array([[1.0, 1, 0], [1, 0, 0]])
    microbatch = {
        "loss_mask": mask,
        "old_log_probs": jnp.zeros((2, 3)),
        "advantages": jnp.ones((2, 3)),
        "ref_log_probs": jnp.full((2, 3), -0.5),
    }
    loss = PolicyLoss(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)
    out = loss(jnp.zeros((2, 3)), jnp.full((2, 3), 2.0), microbatch)
    np.testing.assert_allclose(out.terms["kl"].value, 0.1 * 0.125)
    np.testing.assert_allclose(out.terms["entropy"].value, -0.02)
    np.testing.assert_allclose(out.metrics["ref_kl"].value, 0.125)
    np.testing.assert_allclose(out.metrics["policy_entropy"].value, 2.0)


def test_the_first_update_after_a_rollout_needs_no_old_log_probs(golden):
    given = _cases(golden, "vanilla")[0]["inputs"]
    log_probs, microbatch = jnp.array(given["log_prob"]), _microbatch(given)

    def gradient(loss, microbatch):
        value = lambda x: loss(x, jnp.zeros_like(x), microbatch).terms["policy"].value  # noqa: E731
        return jax.value_and_grad(value)(log_probs)

    passed = gradient(PolicyLoss(), microbatch | {"old_log_probs": log_probs})
    without = {name: leaf for name, leaf in microbatch.items() if name != "old_log_probs"}
    jax.tree.map(np.testing.assert_array_equal, gradient(PolicyLoss(on_policy=True), without), passed)
    assert np.abs(passed[1]).max() > 0


def test_names_and_settings_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="kl_cov picks its tokens"):
        make_surrogate("kl_cov")
    with pytest.raises(ValueError, match="is not one of ppo, gspo"):
        make_surrogate("vanilla")
    with pytest.raises(ValueError, match="it has clip_low, clip_high, dual_clip"):
        make_surrogate("ppo", clip=0.2)
    with pytest.raises(ValueError, match="distances from ratio 1"):
        make_surrogate("ppo", clip_low=1.2)
    with pytest.raises(ValueError, match="reads the leaf 'old_log_probs'"):
        PolicyLoss()(jnp.zeros((1, 2)), jnp.zeros((1, 2)), {"loss_mask": jnp.ones((1, 2))})


@pytest.mark.parametrize("name, leaf", [("advantages", (2,)), ("advantages", (2, 1)), ("segments", (2,))])
def test_a_leaf_that_is_not_per_token_is_refused_by_name(name, leaf):
    leaves = {"loss_mask": (2, 2), "old_log_probs": (2, 2), "advantages": (2, 2)}
    microbatch = {name: jnp.ones(shape) for name, shape in leaves.items()}
    PolicyLoss()(jnp.zeros((2, 2)), jnp.zeros((2, 2)), microbatch)
    said = rf"'{name}' must be \[rows, seq\], as loss_mask is with \(2, 2\), got the shape \({leaf[0]},"
    with pytest.raises(ValueError, match=said):
        PolicyLoss()(jnp.zeros((2, 2)), jnp.zeros((2, 2)), microbatch | {name: jnp.ones(leaf, int)})
    with pytest.raises(ValueError, match=r"'loss_mask' must be \[rows, seq\], got the shape \(2,\)"):
        PolicyLoss()(jnp.zeros((2, 2)), jnp.zeros((2, 2)), microbatch | {"loss_mask": jnp.ones(2)})


def test_a_mask_of_rows_is_refused_before_it_is_read():
    model = Pipelined(
        *[lambda *_: None] * 3, unembed=lambda outer, hidden: Unembedding(hidden, jnp.ones((4, 5)))
    )
    microbatch = {"loss_mask": jnp.ones(2), "targets": jnp.zeros((2, 3), int)}
    with pytest.raises(ValueError, match=r"'loss_mask' must be \[rows, seq\], got the shape \(2,\)"):
        policy_loss_fn(model, PolicyLoss()).head({}, jnp.ones((2, 3, 4)), microbatch, None)
