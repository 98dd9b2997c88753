# --- from here on the same for every job; the lines above set: python, command, again, mark, requeues
set -uo pipefail
umask 077
export PATH="${python%/*}:$PATH"
words=("${command[@]}")
[[ -e $mark ]] && words=("${again[@]}")
say() { printf '%s job %s: %s\n' "$(date '+%F %T')" "$SLURM_JOB_ID" "$*"; }

# The driver is a child of this shell, not of srun: told to end, srun kills what it has started at once. scancel ends every
# process of the job, and gives it KillWait (30 s), in which the driver saves its state. USR1 comes to this shell alone,
# before the time limit: the driver ends, and the job goes back into the queue if this start finished an epoch.
driver='' ray='' signalled='' requeue=''
forward() {
    signalled=yes
    [[ -n $driver ]] && kill -TERM "$driver" 2>/dev/null
}
trap forward TERM
trap 'requeue=yes; forward' USR1

nodes=$SLURM_JOB_NUM_NODES
say "starts on $SLURM_JOB_NODELIST${SLURM_RESTART_COUNT:+ (start $((SLURM_RESTART_COUNT + 1)))}"
progress=${FSDP_LAB_JOB%/*}/progress # the driver makes it when an epoch or a trial is finished
rm -f "$progress"
if ((nodes == 1)); then
    "$python" "${words[@]}" cluster.address=null cluster.job.nodes=1 &
    driver=$!
else
    # A token for this start alone: Ray listens to the whole network. It is in no file.
    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
    # The address at which the last node sees this one, which is the first: a host name may resolve to the loopback.
    last=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)
    host=$(srun --export=ALL --nodes=1 --ntasks=1 --nodelist="$last" printenv SLURM_LAUNCH_NODE_IPADDR) || exit
    export address=$host:$((20000 + SLURM_JOB_ID % 10000)) host
    "$python" "${words[@]}" "cluster.address=$address" "cluster.job.nodes=$nodes" &
    driver=$!
    # --export=ALL: a job of a site with SBATCH_EXPORT=NONE would start its steps without these variables
    step=(srun --export=ALL --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1)
    # In single quotes, since each node has its own values.
    "${step[@]}" bash -c '
        ((SLURM_PROCID == 0)) \
            && where=(--head --port="${address##*:}" --node-ip-address="$host" --include-dashboard=false) \
            || where=(--address="$address")
        exec ray start --block "${where[@]}" --num-cpus="$SLURM_CPUS_ON_NODE" \
            --disable-usage-stats --min-worker-port=0 --max-worker-port=0' &
    ray=$!
    {
        while kill -0 "$ray"; do sleep 1; done
        kill -TERM "$driver" && say "Ray has ended on a node, and so does the sweep"
    } 2>/dev/null &
fi

status=0
while :; do # a trap ends `wait` before the driver has ended
    signalled=''
    wait "$driver"
    code=$?
    ((code == 127)) && break
    status=$code
    [[ -n $signalled ]] || break
done
if [[ -n $ray ]] && kill -0 "$ray" 2>/dev/null; then
    say "the sweep ended with $status; stopping Ray (srun reports that it was killed)"
    kill -TERM "$ray" && wait "$ray"
fi
if [[ -n $requeue && $status == 130 ]]; then
    script="sbatch $(printf %q "$FSDP_LAB_JOB")"
    if [[ -z $requeues ]]; then
        say "the time limit is near; to resume: $script"
    elif [[ ! -e $progress ]]; then
        say "the time limit is near, and no epoch was finished since the start: another start would not get further." \
            "An epoch has to fit into the time limit. To resume: $script"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        say "the time limit is near; the job is back in the queue, and will resume"
        sleep 60 # until Slurm ends this start
    else
        say "the time limit is near, and the job could not be requeued; to resume: $script"
    fi
fi
say "ends with $status"
exit "$status"
