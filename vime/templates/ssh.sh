#!/bin/bash
# A Ray cluster over @nodes@ hosts reached by ssh, and `vime train` on the first of them. Made by: vime launch ssh.
#   bash THIS_FILE HEAD HOST...     # addresses by which the hosts reach each other; SSH="ssh -i key -l me" where plain ssh does not do
# All hosts need the same folder @folder@ on a shared file system, and the same Python environment.
set -euo pipefail
[ $# -eq @nodes@ ] || { echo "usage: $0 HEAD HOST... (@nodes@ in all)" >&2; exit 2; }
read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes}"
ip=$1 port=${PORT:-6379}
token=$(od -An -tx1 -N16 /dev/urandom | tr -d ' \n')
# What a host is to run goes to it through a pipe, so that the token is in no command line.
setup="set -e; cd @folder@; @setup@; export RAY_AUTH_TOKEN=$token"
on() { printf '%s\n' "$setup" "${*:2}" | "${ssh[@]}" "$1" bash -s; }
# Ray on a host for as long as this script holds the pipe; then only that one process is ended.
ray_on() {
  { printf '%s\n' "$setup" "@python@ -m ray.scripts.scripts start --node-ip-address=$1 ${*:2} --block </dev/null & ray=\$!; cat; kill \$ray; wait \$ray"
    exec sleep infinity; } | "${ssh[@]}" "$1" bash -s &
}
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

ray_on "$ip" --head --port="$port" --include-dashboard=false
on "$ip" "until @python@ -c \"@up@\" $ip:$port 2>/dev/null; do sleep 1; done"
for host in "${@:2}"; do ray_on "$host" --address="$ip:$port"; done
on "$ip" "until @python@ -c \"@count@\" $ip:$port 2>/dev/null; do sleep 1; done"
train=$(cat <<'END'
@train@
END
)
on "$ip" "exec $train ray.address=$ip:$port"
