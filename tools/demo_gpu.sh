# tools/demo's part for a machine with a GPU; tools/demo reads it in. A synthetic Llama-3.1-8B, resident once and compressed on the GPU,
# computed with by two workers at once, every result checked, and every account of the memory compared with nvidia-smi's.
# Uses `program`, `say`, $folder and the cleaning up of tools/demo.
# shellcheck shell=bash disable=SC2154

layers=${WEIGHTD_DEMO_LAYERS:-4} tokens=8
weightpack=$(program weightpack tools/pack) weightd=$(program weightd daemon) weightctl=$(program weightctl tools/ctl)
gpu_worker=$(program gpu_worker tests/e2e) trace_check=$(program trace_check tests/e2e)
fail() { echo "demo: $*" >&2; exit 1; }
ctl() { "$weightctl" "$@"; }
# value EXPRESSION: of the JSON on standard input, which is called d.
value() { python3 -c "import json, sys; d = json.load(sys.stdin); print($1)"; }

say "A GPU"
nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv
chunk_mib=1024

say "A synthetic Llama-3.1-8B with $layers layers, its embedding and its head: checkpoint -> bundle"
"$weightpack" synth "$folder/model" --arch llama-3.1-8b --layers "$layers" --seed 1
"$weightpack" synth "$folder/small" --arch qwen3-0.6b --layers 1 --vocab 4096 --seed 2 >/dev/null
"$weightpack" pack "$folder/model" "$folder/model.wpk"
"$weightpack" pack --quiet "$folder/small" "$folder/small.wpk"

say "One daemon on the GPU; it links no CUDA and has no context"
cat >"$folder/weightd.toml" <<CONFIG
backend = "cuda"
data_socket = "$folder/weightd.sock"
control_socket = "$folder/control.sock"
model_folders = ["$folder"]
chunk_bytes = "${chunk_mib}MiB"
CONFIG
export WEIGHTD_CONTROL_SOCKET=$folder/control.sock
"$weightd" --config "$folder/weightd.toml" 2>"$folder/weightd.log" &
daemon_pid=$!
until ctl version >/dev/null 2>&1; do
  kill -0 "$daemon_pid" 2>/dev/null || { cat "$folder/weightd.log"; exit 1; }
done
ctl doctor || echo "(weightctl doctor: exit code $?)"
uuid=$(ctl status --json | value 'd["devices"][0]["uuid"]')

# ask N COMMAND: tells worker N, and puts what it answers into $answer.
ask() {
  local number=$1
  shift
  printf '%s\n' "$*" >&"$((number + 10))"
  IFS= read -r -t 300 answer <&"$((number + 20))" || fail "worker $number does not answer '$*'"
  case $answer in ok*) ;; *) fail "worker $number: $*: $answer" ;; esac
}
field() { sed -n "s/.* $1=\([^ ]*\).*/\1/p" <<<"$answer"; }
mkfifo "$folder/in1" "$folder/in2" "$folder/out1" "$folder/out2"
"$gpu_worker" "$folder/weightd.sock" <"$folder/in1" >"$folder/out1" & worker1_pid=$!
exec 11>"$folder/in1" 21<"$folder/out1"
"$gpu_worker" "$folder/weightd.sock" <"$folder/in2" >"$folder/out2" & worker2_pid=$!
exec 12>"$folder/in2" 22<"$folder/out2"

say "Two workers are there, attached to a small model, when the large one is loaded"
ctl load small "$folder/small.wpk"
for worker in 1 2; do
  ask "$worker" acquire small 0
  ask "$worker" compute 1 "$tokens"
done
loaders() { cat "/proc/$daemon_pid/task/$daemon_pid/children"; }
smi_mib() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --id="$uuid"; }
owned_mib() { ctl status --json | value 'd["devices"][0]["owned_bytes"] // 1048576'; }
# until_steady: nvidia-smi's figure once the loader is gone and the driver has taken its memory back.
until_steady() {
  local last now
  while [ -n "$(loaders)" ]; do :; done
  last=$(smi_mib)
  for _ in $(seq 50); do
    sleep 0.1
    now=$(smi_mib)
    [ "$now" != "$last" ] || break
    last=$now
  done
  echo "$now"
}
smi_before=$(until_steady) owned_before=$(owned_mib)
ctl load demo "$folder/model.wpk"
smi_after=$(until_steady) owned_after=$(owned_mib)
ctl status
rise_smi=$((smi_after - smi_before)) rise_owned=$((owned_after - owned_before))
chunks=$(((rise_owned + chunk_mib - 1) / chunk_mib))
echo
echo "the load made nvidia-smi's figure rise by $rise_smi MiB and weightd's by $rise_owned MiB, in $chunks chunk$([ "$chunks" = 1 ] || echo s)"
difference=$((rise_smi > rise_owned ? rise_smi - rise_owned : rise_owned - rise_smi))
[ "$difference" -le $((2 * chunks)) ] || fail "the two differ by more than 2 MiB a chunk"

say "Both compute from that copy: every layer, random activations, $tokens tokens"
for worker in 1 2; do
  ask "$worker" acquire demo 0
  echo "worker $worker: attached: $(field shared) bytes shared, $(field private) of its own"
done
for worker in 1 2; do printf 'trace %s %s %s\n' "$folder/trace$worker" "$worker" "$tokens" >&"$((worker + 10))"; done
for worker in 1 2; do
  IFS= read -r -t 300 answer <&"$((worker + 20))" || fail "worker $worker does not answer"
  case $answer in ok*) ;; *) fail "worker $worker: $answer" ;; esac
  echo "worker $worker: computed"
done
"$trace_check" "$folder/model" "$folder/trace1" "$folder/trace2"
ask 1 compute 7 "$tokens"
digest=$(field digest)
ask 2 compute 7 "$tokens"
[ "$(field digest)" = "$digest" ] || fail "the workers' bits differ"
echo "the same input gives both the same bits ($digest over $(field layers) layers)"

say "Memory, and one worker killed"
ctl memory
kill -KILL "$worker1_pid"
wait "$worker1_pid" 2>/dev/null || true
worker1_pid=""
until [ "$(ctl leases --json | value 'len(d["leases"])')" = 1 ]; do :; done
echo
ctl leases
ask 2 compute 7 "$tokens"
[ "$(field digest)" = "$digest" ] || fail "the bits differ after the other worker's end"
echo "the other worker computes on, with the same bits"
ctl verify demo
exec 12>&-
wait "$worker2_pid"
worker2_pid=""

say "Unload, stop"
ctl unload demo
ctl unload small
[ "$(owned_mib)" = 0 ] || fail "weightd still owns memory"
kill -TERM "$daemon_pid"
wait "$daemon_pid"
daemon_pid=""
echo "demo: all checks passed"
