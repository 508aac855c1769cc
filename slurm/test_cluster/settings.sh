# shellcheck shell=bash
# shellcheck disable=SC2154  # signature is test-cluster's
# The knobs of a test cluster: defaults, what its folder remembers, what the environment says; and which are possible.

readonly settings=(NODES PREFIX GPUS CPUS MEMORY_MB MAX_ARRAY_SIZE ACCOUNTING PORT NAMESPACES)
declare -A knob=([NODES]=2 [PREFIX]=testnode [GPUS]=8 [CPUS]=16 [MEMORY_MB]=65536 [MAX_ARRAY_SIZE]=1001
  [ACCOUNTING]=1 [PORT]="" [NAMESPACES]=1 [EXTRA]="")

read_settings() { # into knob and names; a cluster that exists keeps what it was made with
  local name value variable i
  if is_ours; then
    while IFS='=' read -r name value; do [[ $name = \#* ]] || knob[$name]=$value; done <"$S/settings"
    knob[EXTRA]=$(cat "$S/extra.conf")
  fi
  for name in "${settings[@]}" EXTRA; do
    variable=TEST_CLUSTER_$name
    [ -n "${!variable+set}" ] || continue
    value=$(printf %s "${!variable}")
    ! is_ours || [ "$value" = "${knob[$name]}" ] ||
      refuse "'$S' was made with $name='${knob[$name]}', not '$value': take another DIR, or stop --remove this one."
    knob[$name]=$value
  done
  check_settings
  names=()
  for ((i = 1; i <= knob[NODES]; i++)); do names+=("${knob[PREFIX]}$i"); done
}

check_settings() {
  local name
  for name in NODES CPUS MEMORY_MB; do
    [[ ${knob[$name]} =~ ^[1-9][0-9]{0,8}$ ]] || refuse "TEST_CLUSTER_$name='${knob[$name]}': choose a number from 1."
  done
  for name in GPUS MAX_ARRAY_SIZE; do
    [[ ${knob[$name]} =~ ^(0|[1-9][0-9]{0,6})$ ]] ||
      refuse "TEST_CLUSTER_$name='${knob[$name]}': choose a number from 0."
  done
  for name in ACCOUNTING NAMESPACES; do
    [[ ${knob[$name]} = [01] ]] || refuse "TEST_CLUSTER_$name='${knob[$name]}': choose 0 or 1."
  done
  [[ ${knob[PORT]} =~ ^([1-9][0-9]{3}|[1-5][0-9]{4})?$ ]] ||
    refuse "TEST_CLUSTER_PORT='${knob[PORT]}': choose a number of 4 or 5 digits below 60000, or none."
  [[ ${knob[PREFIX]} =~ ^[a-z][a-z0-9-]*$ ]] ||
    refuse "TEST_CLUSTER_PREFIX='${knob[PREFIX]}': choose lower-case letters, digits and -, first a letter."
}

check_folder() {
  local length most
  # In one file or another these mean something to SLURM, whatever the quotes (spaces: in the names of devices).
  [[ ! $S =~ [][:space:][:cntrl:]\"\'\\#%,=*?\$\`\&\;\|\<\>\(\)\{\}[] ]] ||
    refuse "SLURM cannot work in '$S': choose a DIR whose path has only letters, digits and . _ - + : @ ~"
  [ ! -e "$S" ] || is_ours || { [ -d "$S" ] && [ -z "$(ls -A --ignore=lock "$S")" ]; } ||
    refuse "'$S' holds something else: choose a new DIR."
  # The longest name of a socket is DIR/spool/NODE/NODE_JOB.STEP, of which Linux takes 107 bytes. STEP has 10 digits;
  # 7 are enough for JOB.
  most=$((107 - 7 - 2 * (${#names[-1]} + 1) - 7 - 11))
  length=$(printf %s "$S" | wc -c)
  [ "$length" -le $most ] ||
    refuse "the path of DIR has $length bytes, sockets leave room for $most: choose a shorter one than '$S'."
}

keep_settings() {
  ! is_ours || return 0
  local name
  printf '%s\n' "${knob[EXTRA]}" >"$S/extra.conf"
  { echo "$signature" && for name in "${settings[@]}"; do echo "$name=${knob[$name]}"; done; } >"$S/settings"
}
