# Background processes of `TerminalNotesEnv`, for any POSIX sh, run as
#
#     set -- TOKEN start NUMBER COMMAND CAP_KIB    set -- TOKEN read NUMBER OFFSET SECONDS
#     set -- TOKEN send NUMBER TEXT END            set -- TOKEN stop NUMBER OFFSET
#     set -- TOKEN list NUMBER...                  set -- TOKEN drop NUMBER...
#
# Prints output of the process, then `@@process NUMBER state=STATE size=BYTES@@`. STATE is running, gone (its files are
# not there), ended, or an exit code; BYTES is how much output there is.

token=$1 action=$2 number=$3
for base in /tmp /var/tmp /dev/shm "$HOME"; do [ -w "$base" ] && break; done
dir=$base/.harbor-trl-processes-$token

nap() { sleep 0.1 2>/dev/null || { sleep 1 && i=$((i + 9)); }; }

# The size is taken last, so that it counts all that a process wrote before it ended.
look() {
    files=$dir/$1 state=running size=0 pid=
    [ -f "$files/out" ] || { state=gone && return; }
    if [ -s "$files/status" ]; then
        read -r state <"$files/status"
    elif [ -s "$files/pid" ]; then
        read -r pid <"$files/pid"
        kill -0 "$pid" 2>/dev/null || state=ended
        [ -s "$files/status" ] && read -r state <"$files/status"
    fi
    size=$(wc -c <"$files/out")
    size=$((size))
}

report() { echo "@@process $1 state=$state size=$size@@"; }

# Output from byte $1 on, as far as `look` saw it.
show() { [ "$size" -gt "$1" ] && tail -c +$(($1 + 1)) "$files/out" | head -c $((size - $1)); }

# To the process's group, and to what left it: the environment is inherited.
send_signal() {
    kill -"$1" -"$pid" 2>/dev/null || kill -"$1" "$pid" 2>/dev/null
    for environ in /proc/[0-9]*/environ; do
        while IFS= read -r line || [ "$line" ]; do
            case $line in *"HARBOR_TRL_PROCESS=$token-$number."*)
                environ=${environ%/environ}
                kill -"$1" "${environ#/proc/}" 2>/dev/null
                break
                ;;
            esac
        done 2>/dev/null <"$environ"
    done 2>/dev/null
}

# Waits for the process, so that its exit code is known and it does not stay as a zombie.
run() (
    trap '' HUP
    exec 3<>"$files/in"
    # Holds the input open between two lines of it; its end is the end of the input.
    sleep 2147483647 &
    echo $! >"$files/keeper"
    (
        trap '' XFSZ
        exec 3>&-
        ulimit -f "$blocks"
        cat >"$files/out"
        exec cat >/dev/null
    ) <"$files/pipe" &
    pump=$!
    (
        exec 3>&-
        export HARBOR_TRL_PROCESS="$token-$number."
        exec $setsid "$shell" -c "$command"
    ) <"$files/in" >"$files/pipe" 2>&1 &
    pid=$!
    echo "$pid" >"$files/pid"
    exec 3>&-
    wait "$pid"
    status=$?
    # What it wrote is on its way to the file; what it started may write on.
    i=0
    while [ "$i" -lt 10 ] && kill -0 "$pump"; do
        nap
        i=$((i + 1))
    done
    echo "$status" >"$files/status"
    read -r keeper <"$files/keeper" && kill "$keeper"
)

case $action in
start)
    command=$4 files=$dir/$number
    shell=sh
    command -v bash >/dev/null && shell=bash
    setsid=
    command -v setsid >/dev/null && setsid=setsid
    # `ulimit -f` counts 512 bytes; bash counts 1024, unless it is in POSIX mode.
    blocks=$(($5 * 2))
    case $BASH_VERSION:$SHELLOPTS in :* | *posix*) ;; *) blocks=$5 ;; esac
    rm -rf "$files"
    if mkdir -p "$files" && mkfifo -m 600 "$files/in" "$files/pipe" && : >"$files/out"; then
        run </dev/null >/dev/null 2>&1 &
        i=0
        while [ "$i" -lt 5 ]; do
            nap
            look "$number"
            { [ "$size" -gt 0 ] || [ "$state" != running ]; } && break
            i=$((i + 1))
        done
        show 0
        report "$number"
    else
        echo "[not started: the sandbox cannot make files in $dir]"
    fi
    ;;
read)
    offset=$4 i=0
    look "$number"
    while [ "$i" -lt $(($5 * 10)) ] && [ "$size" -le "$offset" ] && [ "$state" = running ]; do
        nap
        look "$number"
        i=$((i + 1))
        [ "$size" -gt "$offset" ] && sleep 0.1 2>/dev/null && look "$number"
    done
    show "$offset"
    report "$number"
    ;;
send)
    look "$number"
    if [ "$state" = running ]; then
        [ "$4" ] && printf %s "$4" >"$files/in"
        [ "$5" = 1 ] && read -r keeper <"$files/keeper" && kill "$keeper"
    fi
    report "$number"
    ;;
stop)
    look "$number"
    if [ "$pid" ]; then
        send_signal TERM
        i=0
        while [ "$i" -lt 30 ] && [ "$state" = running ]; do
            nap
            look "$number"
            i=$((i + 1))
        done
        send_signal KILL
        i=0
        while [ "$i" -lt 20 ] && [ ! -s "$files/status" ]; do
            nap
            i=$((i + 1))
        done
        look "$number"
    fi
    show "$4"
    report "$number"
    rm -rf "$files"
    ;;
list)
    shift 2
    for number; do
        look "$number"
        report "$number"
    done
    ;;
drop)
    shift 2
    for number; do rm -rf "${dir:?}/$number"; done
    ;;
esac
