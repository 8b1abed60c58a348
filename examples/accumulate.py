import jax
import jax.numpy as jnp

import jaxfb

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)


def loss_fn(params, microbatch, rng):  # any model over any pytree of params; it sums and never divides
    guess = jnp.tanh(microbatch["x"] @ params["w1"]) @ params["w2"]
    error = jnp.square(guess - microbatch["y"]).sum(-1)
    return jaxfb.Sum(jnp.where(microbatch["mask"], error, 0).sum(), microbatch["mask"].sum())


keys = iter(jax.random.split(jax.random.key(0), 5))
params = {"w1": jax.random.normal(next(keys), (16, 32)), "w2": jax.random.normal(next(keys), (32, 4))}
batch = {"x": jax.random.normal(next(keys), (64, 16)), "y": jax.random.normal(next(keys), (64, 4))}
batch["mask"] = jax.random.bernoulli(next(keys), 0.3, (64,))  # ragged: a mean of means would be wrong

loss, grads = jax.value_and_grad(lambda p: loss_fn(p, batch, None).value)(params)  # 64 rows at once

plan = jaxfb.BatchPlan(rows=64, rows_per_microbatch=2, data_parallel=4)  # 8 microbatches on 4 replicas
forward_backward = jaxfb.get_forward_backward_func(jaxfb.make_mesh(data=2, fsdp=2))
out = forward_backward(loss_fn, params, batch, plan)

print(f"loss {out.loss:.12f}, full batch {loss:.12f}")
print("gradient differs by", max(float(abs(out.grads[w] - grads[w]).max()) for w in grads))
