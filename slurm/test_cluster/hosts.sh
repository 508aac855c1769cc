# shellcheck shell=bash disable=SC2016,SC2154  # knobs and names are settings.sh's; '$' is for another shell
# Every node has a host name of its own, and the names of nodes resolve to loopback: ranks use them as MASTER_ADDR.
#
# Where the kernel allows it, a daemon and its jobs get a host name and an /etc/hosts of their own, and the machine's
# stay as they are. Elsewhere root writes the names into the machine's /etc/hosts, together with the machine's own name:
# SLURM listens where its host name points to, and that has to be loopback.

choose_view() { # sets view: own (host name and /etc/hosts), hostname or none
  local user=()
  drop=()
  if [ "$(id -u)" != 0 ]; then
    user=(--user --map-current-user --keep-caps)
    drop=(setpriv --ambient-caps=-all --inh-caps=-all) # the rights to set up the view end there
  fi
  enter=(unshare "${user[@]}" --uts --mount --propagation slave)
  { echo "127.0.0.1 localhost" && printf '127.0.0.1 %s\n' "${names[@]}" && cat /etc/hosts; } >"$S/hosts"
  view=none
  if [ "${knob[NAMESPACES]}" = 1 ]; then
    if "${enter[@]}" sh -c 'hostname localhost && mount --bind "$0" /etc/hosts' "$S/hosts" 2>/dev/null; then
      view=own
    elif unshare --uts hostname localhost 2>/dev/null; then
      view=hostname
    fi
  fi
  [ $view = own ] || edit_hosts add || getent hosts "${names[@]}" >/dev/null ||
    say "warning: ranks on different nodes will not find each other: add '127.0.0.1 ${names[*]}' to /etc/hosts."
  [ $view != none ] || getent ahostsv4 "$(hostname)" | head -n 1 | grep -q '^127\.' ||
    refuse "SLURM would be reachable from outside: give '$(hostname)' the address 127.0.1.1 in /etc/hosts, or be root."
}

on_host() { # on_host NAME DAEMON ARGUMENT...
  local host=$1
  shift
  case $view in
    own) daemon "${enter[@]}" sh -c 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"' \
      "$host" "$S/hosts" "${drop[@]}" "$@" ;;
    hostname) daemon unshare --uts sh -c 'hostname "$0" && exec "$@"' "$host" "$@" ;;
    none) daemon "$@" ;;
  esac || fail "$1 did not start: see $S/log"
}

edit_hosts() ( # edit_hosts add|drop; in place, since in a container the file is a mount. Several clusters may edit it.
  [ -w /etc/hosts ] || exit 1
  exec 8</etc/hosts
  flock 8
  others=$(mark="$signature $S" awk '{ at = length($0) - length(ENVIRON["mark"]) + 1 }
    at < 1 || substr($0, at) != ENVIRON["mark"]' /etc/hosts)
  ours=()
  if [ "$1" = add ]; then # at the top, where they count
    own=()
    [ "$view" != none ] || own=("$(hostname)") # the name that daemons go by which have none of their own
    for name in "${names[@]}" "${own[@]}"; do ours+=("127.0.0.1 $name $signature $S"); done
  fi
  lines=$(printf '%s\n' "${ours[@]}" "$others")
  [ "$lines" = "$(cat /etc/hosts)" ] || printf '%s\n' "$lines" >/etc/hosts
)
