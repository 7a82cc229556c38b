#!/bin/bash
# Two hosts as two network namespaces: a server in one, two sites with data of their own in the other.
#     sudo benchmarks/deploy/namespaces.sh [FOLDER]     (needs fedhelix[flower] on PATH, and iproute2)
set -eu
folder=${1:-$(mktemp -d)}
mkdir -p "$folder/server" "$folder/clinic-a" "$folder/clinic-b"
server="ip netns exec fedhelix-server" site="ip netns exec fedhelix-site"
pids=()
clean() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  ip netns del fedhelix-server 2>/dev/null || true
  ip netns del fedhelix-site 2>/dev/null || true
}
trap clean EXIT
ip netns add fedhelix-server
ip netns add fedhelix-site
ip link add fhx-server netns fedhelix-server type veth peer name fhx-site netns fedhelix-site
$server ip addr add 10.99.0.1/24 dev fhx-server && $server ip link set fhx-server up && $server ip link set lo up
$site ip addr add 10.99.0.2/24 dev fhx-site && $site ip link set fhx-site up && $site ip link set lo up

echo "# data of the sites: half of the digits each"
python - "$folder" <<'PYTHON'
import sys
import numpy as np
from fedhelix import load
data = load("digits")
for number, name in enumerate(("clinic-a", "clinic-b")):
    np.savez(f"{sys.argv[1]}/{name}/data.npz", x=data.x[number::2, 0].numpy(), y=data.y[number::2].numpy())
np.savez(f"{sys.argv[1]}/server/data.npz", x=data.x_test[:, 0].numpy(), y=data.y_test.numpy())
PYTHON

cd "$folder/server"
fedhelix deploy keys clinic-a clinic-b --host 10.99.0.1
for name in clinic-a clinic-b; do cp deployment/keys/ca.pem "deployment/keys/$name.key" "$folder/$name/"; done
$server fedhelix deploy serve --host 0.0.0.0 --port 8000 > serve.log 2>&1 & pids+=($!)
until $server fedhelix deploy admit clinic-a clinic-b 2>/dev/null; do sleep 2; done

echo "# the commands' part, from the site's host"
$site curl --silent --output /dev/null --write-out '%{http_code}\n' --cacert "$folder/clinic-a/ca.pem" \
  -X POST https://10.99.0.1:8000/v1/control/start-run

for name in clinic-a clinic-b; do
  cd "$folder/$name"
  $site fedhelix site --name "$name" --superlink 10.99.0.1:8000 --cert ca.pem --key "$name.key" --data data.npz \
    > site.log 2>&1 & pids+=($!)
done
cd "$folder/server"
$server fedhelix deploy run genfed --superlink 127.0.0.1:8000 --data own --clients 2 --rounds 5 \
  --term server_data="$PWD/data.npz" --out run
