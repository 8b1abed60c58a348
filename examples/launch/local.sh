#!/usr/bin/env bash
# examples/launch/local.sh configs/mesh8.yaml [key=value ...]
# One job as two processes of this machine, four simulated CPU devices each: the rehearsal of a job on two hosts.
# In the environment: PROCESSES=2 DEVICES=4 PYTHON=python
set -euo pipefail
processes=${PROCESSES:-2}
python=${PYTHON:-python}
port=$("$python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')

export JAX_PLATFORMS=cpu XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=${DEVICES:-4}"
export JAX_COORDINATOR_ADDRESS=127.0.0.1:$port JAX_NUM_PROCESSES=$processes

others=()
for ((index = 1; index < processes; index++)); do
  JAX_PROCESS_ID=$index "$python" -m jaxfb.cli train "$@" &
  others+=($!)
done
code=0
JAX_PROCESS_ID=0 "$python" -m jaxfb.cli train "$@" || code=$?
for other in "${others[@]}"; do
  wait "$other" || code=$?
done
exit $code
