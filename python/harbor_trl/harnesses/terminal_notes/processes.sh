# Background processes of `TerminalNotesEnv`, for any POSIX sh, run from the directory of their files as
#
#     sh processes.sh start NUMBER COMMAND CAP_KIB    sh processes.sh read NUMBER OFFSET SECONDS
#     sh processes.sh send NUMBER TEXT END            sh processes.sh stop NUMBER OFFSET
#     sh processes.sh list NUMBER...                  sh processes.sh drop NUMBER...
#
# Prints output of the process, then `@@process NUMBER state=STATE size=BYTES@@`. STATE is running, gone (its files are
# not there), ended, or an exit code; BYTES is how much output there is.

dir=${0%/*} action=$1 number=$2

nap() { sleep 0.1 2>/dev/null || { sleep 1 && i=$((i + 9)) tries=$((tries + 9)); }; }

# The size is taken last, so that it counts all that a process wrote before it ended.
look() {
    files=$dir/$1 state=running size=0 pid=
    [ -f "$files/out" ] || { state=gone && return; }
    if [ -s "$files/status" ]; then
        read -r state <"$files/status"
    elif [ -s "$files/pid" ]; then
        read -r pid <"$files/pid"
        tries=0
        while [ "$tries" -lt 20 ] && [ ! -s "$files/status" ] && ! kill -0 "$pid" 2>/dev/null; do
            tries=$((tries + 1))
            nap
        done
        [ "$tries" -lt 20 ] || state=ended
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
            case $line in *"HARBOR_TRL_PROCESS=$dir/$number."*)
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
        export HARBOR_TRL_PROCESS="$dir/$number."
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
    command=$3 files=$dir/$number
    shell=sh
    command -v bash >/dev/null && shell=bash
    setsid=
    command -v setsid >/dev/null && setsid=setsid
    # `ulimit -f` counts 512 bytes; bash counts 1024, unless it is in POSIX mode.
    blocks=$(($4 * 2))
    case $BASH_VERSION:$SHELLOPTS in :* | *posix*) ;; *) blocks=$4 ;; esac
    rm -rf "$files"
    if mkdir -p "$files" && mkfifo -m 600 "$files/in" "$files/pipe" && : >"$files/out"; then
        # By `exec`: the shell would keep copies of what a mere redirection replaces, and the call would not end.
        (
            exec </dev/null >/dev/null 2>&1
            run
        ) &
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
    offset=$3 i=0
    look "$number"
    while [ "$i" -lt $(($4 * 10)) ] && [ "$size" -le "$offset" ] && [ "$state" = running ]; do
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
        [ "$3" ] && printf %s "$3" >"$files/in"
        [ "$4" = 1 ] && read -r keeper <"$files/keeper" && kill "$keeper"
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
    show "$3"
    report "$number"
    rm -rf "$files"
    ;;
list)
    shift
    for number; do
        look "$number"
        report "$number"
    done
    ;;
drop)
    shift
    for number; do rm -rf "${dir:?}/$number"; done
    ;;
esac
