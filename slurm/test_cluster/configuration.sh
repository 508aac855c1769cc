# shellcheck shell=bash disable=SC2154  # names and knobs are settings.sh's
# What SLURM reads: written whenever nothing runs, from the knobs, for ports that are free.

write_configuration() {
  local me port keys i
  me=$(id -un) port=${knob[PORT]}
  : "${port:=$((16000 + $(printf %s "$S" | cksum | cut -d ' ' -f 1) % 12000))}" # below those that clients are given
  while ports_busy "$port"; do port=$((port + ${#names[@]} + 2)); done

  case $(slurmctld -V) in # no cgroups: the plugin for the first version does nothing unless asked, the other wants systemd
    *" "2[0-3].*) echo CgroupPlugin=cgroup/v1 ;;
    *) echo CgroupPlugin=disabled ;;
  esac >"$S/cgroup.conf"

  echo AutoDetect=off >"$S/gres.conf"
  if [ "${knob[GPUS]}" -gt 0 ]; then
    # Only with character devices, and a link to one will do, are there indices in CUDA_VISIBLE_DEVICES.
    for ((i = 0; i < knob[GPUS]; i++)); do ln -sfn /dev/null "$S/dev/gpu$i"; done
    echo "NodeName=${knob[PREFIX]}[1-${knob[NODES]}] Name=gpu Type=fake File=$S/dev/gpu[0-$((i - 1))]" >>"$S/gres.conf"
  fi

  (umask 077 && slurmdbd_conf >"$S/slurmdbd.conf")
  keys=$(sed -n 's/^[[:space:]]*\([A-Za-z]*\)[[:space:]]*=.*/\1/p' "$S/extra.conf" |
    sed -E '/^(NodeName|PartitionName)$/Id' | paste -sd '|')
  { slurm_conf | sed -E "/^(${keys:-#})=/Id" && cat "$S/extra.conf"; } >"$SLURM_CONF"
}

ports_busy() { # ports_busy FIRST: one for slurmctld, one for slurmdbd, one for each node
  local p
  for ((p = $1; p < $1 + ${#names[@]} + 2; p++)); do (: <>"/dev/tcp/127.0.0.1/$p") 2>/dev/null && return 0; done
  return 1
}

slurmdbd_conf() {
  cat <<CONF
AuthType=auth/munge
AuthInfo=socket=$S/munge/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((port + 1))
CommunicationParameters=NoInAddrAny
SlurmUser=$me
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=$me
StorageLoc=slurm_acct_db
TrackWCKey=yes
LogFile=$S/log/slurmdbd.log
PidFile=$S/run/slurmdbd.pid
CONF
}

slurm_conf() {
  local gres="" i memory_per_cpu=$((knob[MEMORY_MB] / knob[CPUS]))
  cat <<CONF
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it may start again: 120 s where nothing is set
AuthInfo=socket=$S/munge/munge.socket,cred_expire=5
StateSaveLocation=$S/ctld
SlurmdSpoolDir=$S/spool/%n
SlurmctldPidFile=$S/run/slurmctld.pid
SlurmdPidFile=$S/run/slurmd.%n.pid
SlurmctldLogFile=$S/log/slurmctld.log
SlurmdLogFile=$S/log/slurmd.%n.log
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MailProg=/bin/true
MpiDefault=none
# no cgroups, no pinning: works in a container
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=$memory_per_cpu
MaxArraySize=${knob[MAX_ARRAY_SIZE]}
# a job that can never run is refused, not queued
EnforcePartLimits=ALL
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# at preemption a job gets the signal it asked for with --signal, not just SIGTERM
SlurmctldParameters=preempt_send_user_signal
# short timers, so that failures show soon
ReturnToService=2
SlurmdTimeout=10
KillWait=10
# how long squeue and scontrol go on showing a job that has ended
MinJobAge=3600
# claimed, not real, resources
SlurmdParameters=config_overrides
CONF
  [ "${knob[ACCOUNTING]}" = 0 ] || cat <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((port + 1))
# the way to munged once more: without it clients look in /run/munge first, for seconds
AccountingStoragePass=$S/munge/munge.socket
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
AccountingStorageEnforce=associations,limits,qos
TrackWCKey=yes
CONF
  [ "${knob[GPUS]}" = 0 ] || gres=" Gres=gpu:fake:${knob[GPUS]}"
  for i in "${!names[@]}"; do
    echo "NodeName=${names[i]} NodeHostname=${names[i]} NodeAddr=127.0.0.1 Port=$((port + 2 + i))" \
      "CPUs=${knob[CPUS]} RealMemory=${knob[MEMORY_MB]} Feature=emulated$gres"
  done
  cat <<CONF
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE GraceTime=30
PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=INFINITE PreemptMode=OFF
PartitionName=short Nodes=ALL PriorityTier=1 MaxTime=1 DefaultTime=1
CONF
}
