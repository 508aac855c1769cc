# shellcheck shell=bash
# Starting daemons, finding what belongs to a cluster, ending it.
#
# A daemon belongs to this cluster by what it has open in DIR, never by its name alone. (Its environment would not do:
# slurmstepd writes its title over it.)

daemon() { # in a clean environment; keeps neither our lock nor our caller's pipe
  local mysql=${MYSQL_UNIX_PORT+MYSQL_UNIX_PORT=$MYSQL_UNIX_PORT}
  env -i PATH="$PATH" HOME="${HOME-/}" LANG=C SLURM_CONF="$SLURM_CONF" ${mysql:+"$mysql"} "$@" \
    </dev/null >>"$S/log/start.log" 2>&1 9>&-
}

has_open() { [ -n "$(find "/proc/$1/fd" -lname "$S/*" -print -quit 2>/dev/null)" ]; }

alive() { # alive DAEMON: by its pid file; a zombie has nothing open
  local pid=""
  { read -r pid <"$S/run/$1.pid" || [ -n "$pid" ]; } 2>/dev/null && has_open "$pid"
}

daemons() { # the pids of all daemons and job steps
  local file pid name
  for file in /proc/[0-9]*/comm; do
    { read -r name <"$file"; } 2>/dev/null || continue
    case $name in slurmd | slurmctld | slurmscriptd | slurmdbd | slurmstepd | munged | mariadbd) ;; *) continue ;; esac
    pid=${file#/proc/} pid=${pid%/comm}
    ! has_open "$pid" || echo "$pid"
  done
}

job_processes() { # the pids of what jobs have started: what is below a step, or has one of our jobs in its environment
  local pid name roots callers=" $$ "
  roots=$(grep -lzxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ 2>/dev/null |
    xargs -r grep -lz '^SLURM_JOB_ID=' 2>/dev/null | tr -dc '0-9\n' || true) # other users' cannot be read
  for pid in $(daemons); do
    { read -r name <"/proc/$pid/comm"; } 2>/dev/null && [ "$name" = slurmstepd ] && roots+=" $pid"
  done
  pid=$$ # whoever called us is not meant, even within a job
  while pid=$(sed -n 's/^PPid:\s*//p' "/proc/$pid/status" 2>/dev/null) && [ "${pid:-0}" -gt 1 ]; do
    callers+="$pid "
  done
  { cat /proc/[0-9]*/stat 2>/dev/null || true; } | awk -v roots="${roots//$'\n'/ }" '
    BEGIN { n = split(roots, list, " "); for (i = 1; i <= n; i++) found[list[i]] = 1 }
    { sub(/\(.*\)/, "-"); parent[$1] = $4 }
    END {
      do {
        more = 0
        for (pid in parent) if (!found[pid] && found[parent[pid]]) more = found[pid] = 1
      } while (more)
      for (pid in found) if (found[pid]) print pid
    }' | while read -r pid; do
    [[ $callers = *" $pid "* ]] || ended "$pid" || echo "$pid"
  done
}

ended() { # a zombie is only its parent's business
  local state
  state=$(sed -n 's/^State:\s*//p' "/proc/$1/status" 2>/dev/null) || true
  [[ -z $state || $state = [ZX]* ]]
}

terminate() { # terminate DAEMON...
  local name pid pids=() n=100
  for name; do
    ! alive "$name" || { read -r pid <"$S/run/$name.pid" || true; kill "$pid" && pids+=("$pid"); }
  done
  for pid in "${pids[@]}"; do
    until ended "$pid" || ((n-- <= 0)); do sleep 0.1; done
  done
}

with_birth() { # adds to pids on stdin when their processes were started: pids are used again
  local pid
  while read -r pid; do echo "$pid $(birth "$pid")"; done
}

birth() { awk '{ sub(/\(.*\)/, "-"); print $22 }' "/proc/$1/stat" 2>/dev/null || true; }

still_there() { # of what with_birth has printed
  local pid time
  while read -r pid time; do
    [ -z "$pid" ] || ended "$pid" || [ "$(birth "$pid")" != "$time" ] || echo "$pid"
  done
}

kill_everything() { # kill_everything [KNOWN]: all that belongs to the cluster, and what with_birth has printed
  local pid pids all=() n=100
  while mapfile -t pids < <(daemons; job_processes; still_there <<<"${1-}") && [ ${#pids[@]} -gt 0 ]; do
    ((n-- > 0)) || fail "processes that do not end: ${pids[*]}"
    kill -KILL "${pids[@]}" 2>/dev/null || true
    all+=("${pids[@]}")
    sleep 0.05
  done
  for pid in "${all[@]}"; do until ended "$pid"; do sleep 0.02; done; done
  rm -f "$S"/run/*.pid
  edit_hosts drop || true # not ours to edit, so none of our lines is in it
}
