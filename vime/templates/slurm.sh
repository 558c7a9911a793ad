#!/bin/bash
# A Ray cluster over the nodes of a Slurm job, and `vime train` on it. Made by: vime launch slurm. Submit with sbatch.
#SBATCH --job-name=@name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=1
#SBATCH --@gres@@gpus@
#SBATCH --exclusive
#SBATCH --output=@name@-%j.log
set -euo pipefail
cd @folder@
@setup@
export RAY_AUTH_TOKEN="$(od -An -tx1 -N16 /dev/urandom | tr -d ' \n')" # in the environment only: nobody else's jobs may join
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 20000))
on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head")
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT # Ray ends with the job's steps

"${on_head[@]}" @python@ -m ray.scripts.scripts start --head --node-ip-address="$ip" --port="$port" --include-dashboard=false --block &
if [ @nodes@ -gt 1 ]; then
  srun --overlap --nodes=@workers@ --ntasks=@workers@ --exclude="$head" \
    bash -c "until @python@ -m ray.scripts.scripts start --address=$ip:$port --block; do sleep 2; done" &
fi
"${on_head[@]}" bash -c "until @python@ -c \"@count@\" $ip:$port 2>/dev/null; do sleep 2; done"
"${on_head[@]}" @train@ ray.address="$ip:$port"
