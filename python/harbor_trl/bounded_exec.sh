# Runs one command, bounded in time and output. POSIX sh, run by `sh` or `bash` as
#
#     set -- ID SECONDS SHOWN KEEP CAP_KIB [FILE]; eval "$HARBOR_TRL_WRAPPER"
#
# ID       unique, unguessable; marks this call's processes and the lines that are not output
# SECONDS  deadline
# SHOWN    output of more bytes than this stays in a file
# KEEP     of output of more than twice this, only the first and last KEEP are sent
# CAP_KIB  the command is stopped when it has written this much
# FILE     holds the command; without it HARBOR_TRL_COMMAND does
#
# The command is handed to bash, else to sh. Prints `MARK start`, the output, `MARK key=value ...`; MARK is
# @@harbor-trl-ID@@. Lines like this one are cut before use. Script and command are passed in the environment, so that
# `ps` does not show them and `pkill -f` does not hit them. Uses builtins where it can: each process costs a
# millisecond, and none can be had while a fork bomb runs.

id=$1 seconds=$2 shown=$3 keep=$4 cap=$5 file=$6 command=$HARBOR_TRL_COMMAND
mark=@@harbor-trl-$id@@ grep=
printf '%s start\n' "$mark"
exec 2>/dev/null
read -r _ _ _ _ own_group _ </proc/self/stat

# The command's first process leads its session and group; what left the group still carries the mark in its
# environment. The watchdog must not be ended in the middle of this.
slay() {
    trap '' USR1 USR2
    slain=1
    [ "$base" ] && read -r pid _ <"$base.pid" || read -r pid _ <&6
    if [ "$pid" ]; then
        read_start "$pid"
        begun=$started
        kill -TERM -"$pid" || kill -TERM "$pid"
        i=0
        while [ "$i" -lt 10 ] && kill -0 -"$pid"; do
            sleep 0.1 || sleep 1
            i=$((i + 1))
            # When it has ended, its number may go to somebody else.
            read_start "$pid"
            [ -z "$started" ] || [ "$started" = "$begun" ] || { pid= && break; }
        done
    fi
    # Other shells than bash read byte by byte, which takes long where there are many processes.
    [ "$BASH_VERSION" ] || { grep -qsz . /proc/$$/environ && grep=1; }
    slay_now "$id"
    slain=
}

# When process $1 was started; empty if there is none.
read_start() {
    started= line=
    read -r line <"/proc/$1/stat" || return
    set -- ${line##*) }
    started=${20}
}

# Whether the environment in file $1 carries the mark of call $2.
is_marked() {
    while IFS= read -r line || [ "$line" ]; do
        case $line in *HARBOR_TRL_EXEC="$2"*) return 0 ;; esac
    done <"$1"
    return 1
}

# Marked by: $1.
slay_now() {
    [ "$pid" ] && { kill -KILL -"$pid" || kill -KILL "$pid"; }
    for pass in 1 2 3; do
        found=
        environs='/proc/[0-9]*/environ'
        [ "$grep" ] && environs=$(grep -lsz "HARBOR_TRL_EXEC=$1" $environs)
        for environ in $environs; do
            is_marked "$environ" "$1" || continue
            process=${environ%/environ}
            read -r _ _ _ _ other _ <"$process/stat" || continue
            # It may have ended meanwhile, and its number be another's.
            is_marked "$environ" "$1" || continue
            # Its group too: a fork bomb is faster than this loop.
            [ "$other" -gt 1 ] && [ "$other" != "$own_group" ] && kill -KILL -"$other"
            kill -KILL "${process#/proc/}" && found=1
        done
        [ "$found" ] || break
    done
    # Processes of another user are out of reach, unless sudo asks for no password.
    [ "$pid" ] && [ -e "/proc/$pid" ] && command -v sudo >/dev/null && sudo -n kill -KILL -- -"$pid" </dev/null >/dev/null
}

find_output() {
    out=$base.out
    [ -e "$out" ] || out=/proc/$$/fd/8
}

# Whether this child runs. Not a zombie, which `kill -0` takes for alive, nor another process that has its number by now:
# bash waits for children unasked.
alive() {
    kill -0 "$1" || return 1
    read -r _ _ state parent _ <"/proc/$1/stat" || state= parent=$$
    [ "$state" != Z ] && [ "$parent" = $$ ]
}

# Whole seconds of a clock that nobody sets.
read_clock() {
    IFS=. read -r now _ </proc/uptime || now=
}

# cgroup v2, v1.
count_oom_kills() {
    oom_kills=0
    for events in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
        [ -r "$events" ] && while read -r key value; do
            [ "$key" = oom_kill ] && oom_kills=$value
        done <"$events"
    done
}

# The command in a session of its own, output to descriptor 9. In the foreground: a shell starts background processes
# with SIGINT ignored, and they could not get rid of that.
launch() (
    { read -r pid _ </proc/self/stat || pid=$(exec sh -c 'echo "$PPID"'); } && [ "$base" ] && echo "$pid" >"$base.pid"
    HARBOR_TRL_EXEC=$id TERM=${TERM-dumb} PAGER=${PAGER-cat} GIT_PAGER=${GIT_PAGER-cat} MANPAGER=${MANPAGER-cat}
    GIT_TERMINAL_PROMPT=${GIT_TERMINAL_PROMPT-0} DEBIAN_FRONTEND=${DEBIAN_FRONTEND-noninteractive}
    export HARBOR_TRL_EXEC TERM PAGER GIT_PAGER MANPAGER GIT_TERMINAL_PROMPT DEBIAN_FRONTEND
    unset HARBOR_TRL_WRAPPER
    [ "$mode" = file ] && ulimit -f "$blocks"
    if [ "$file" ]; then
        # Not `. FILE`: messages would name the file.
        export HARBOR_TRL_COMMAND="$file"
        command='set -- "$(cat "$HARBOR_TRL_COMMAND")"; unset HARBOR_TRL_COMMAND; eval "shift; $1"'
    else
        unset HARBOR_TRL_COMMAND
    fi
    exec $setsid "$shell" -c "$command" </dev/null >&9 2>&1 9>&- 8<&- 7>&- 6<&-
)

# What is left when no process can be started any more.
print_with_builtins() {
    i=0
    while [ "$i" -lt 200 ] && IFS= read -r line; do
        printf '%s\n' "$line"
        i=$((i + 1)) line=
    done <&8
    printf %s "$line"
    IFS= read -r line <&8 && lost=1
}

report() {
    count_oom_kills
    printf '%s rc=%s size=%s timed_out=%s over=%s lost=%s exhausted=%s held=%s ooms=%s mode=%s shell=%s group=%s file=%s end\n' "$mark" \
        "$status" "${size:-0}" "$timed_out" "${over:-0}" "$lost" "${exhausted:-0}" "$held" "$((oom_kills - oom_before))" \
        "$mode" "$shell" "$group" "$kept"
    reported=1
}

# A shell that cannot fork ends here. What this command or an earlier one left running is the likely reason.
emergency() {
    [ "$reported" ] && return
    read -r self _ </proc/self/stat && [ "$self" != "$$" ] && return
    trap '' USR1 USR2
    read -r pid _ <&6
    slay_now
    print_with_builtins
    status=${status:-125} exhausted=1
    report
}

shell=sh
command -v bash >/dev/null && shell=bash
setsid= group=none
if command -v setsid >/dev/null; then
    setsid=setsid group=session
else
    set -m && group=job
fi
# `ulimit -f` counts 512 bytes; bash counts 1024, unless it is in POSIX mode.
blocks=$((cap * 2))
case $BASH_VERSION:$SHELLOPTS in :* | *posix*) ;; *) blocks=$cap ;; esac
count_oom_kills
oom_before=$oom_kills

# On a full disk a file can be made but not written.
base=
for dir in /tmp /dev/shm /var/tmp "$HOME" "$PWD"; do
    [ -w "$dir" ] || continue
    base=$dir/harbor-trl-$id
    printf x >"$base.out" && echo >"$base.pid" && break
    rm -f "$base.out" "$base.pid"
    base=
done
if [ "$base" ]; then
    # Whoever removes the files does not take the output with them.
    exec 6<"$base.pid" 7>"$base.out" 8<"$base.out"
    trap emergency EXIT
else
    exec 6</dev/null 7>/dev/null 8</dev/null
fi

# Not by exit status: bash forgets that of a process that ends while a trap interrupts `wait`.
timed_out=0 lost=0 held=0 alarm=
# Whoever looks for its own processes to end may well hit these.
trap : TERM INT HUP
# Until the watchdog has handlers of its own, a signal must not end it.
trap '' USR1 USR2
# Without `sleep`, only the caller keeps the deadline.
watchdog=
command -v sleep >/dev/null && {
(
    trap - EXIT
    exec >/dev/null 7>&- 8<&-
    # A signal sent before the handlers stood is lost, but what it said is in the file.
    look_up() {
        line=
        [ "$base" ] && read -r line <"$base.pid"
        case $line in
        over) kill $!; exit 0 ;;
        ended) ended=1 ;;
        esac
        :
    }
    trap '[ "$slain" ] && grep= && slay_now "$id"; kill -USR2 $$' EXIT
    trap : TERM INT HUP
    trap 'kill $!; exit 0' USR1
    # Ends the sleep, not only the wait: it may come before that.
    trap 'ended=1; kill $!' USR2
    read_clock
    end=$((now + seconds))
    while :; do
        sleep "$((end - now))" &
        look_up
        [ "$ended" ] || wait $!
        # The command may end all that is called `sleep`.
        read_clock
        { [ "$ended" ] || [ "${now:-$end}" -ge "$end" ]; } && break
    done
    # From here on it is decided: a call that is over by now ends without a word, any other has timed out.
    trap '' USR1 USR2
    look_up
    if [ "$ended" ]; then
        kill $!
        trap 'kill $!; exit 0' USR1
        # If its output does not end soon, a background process holds it.
        while look_up; do
            sleep 0.2 &
            wait $!
            kill -USR2 $$ || exit 0
        done
    fi
    kill -USR1 $$
    slay
    sleep 0.1
) &
watchdog=$!
}
trap 'timed_out=1' USR1
trap 'alarm=1' USR2
trap 'lost=1' ALRM

mode=direct
if [ "$base" ]; then
    mode=file
    command -v cat >/dev/null && command -v sleep >/dev/null && mkfifo -m 600 "$base.fifo" && mode=fifo
fi
case $mode in
fifo)
    # Opened for both first: opening one end alone waits for the other, for ever if that never starts.
    exec 5<>"$base.fifo"
    exec 4<"$base.fifo" 9>"$base.fifo"
    exec 5<&-
    (
        trap - EXIT
        trap : TERM INT HUP
        trap '' XFSZ
        exec >/dev/null 9>&-
        ulimit -f "$blocks"
        cat <&4 >&7 && exit 0
        find_output
        if [ "$(wc -c <"$out")" -ge $((cap * 1024)) ]; then
            cat <&4 &
            slay
        else
            kill -ALRM $$
            cat <&4
        fi
    ) &
    reader=$!
    exec 4<&- 7>&-
    launch
    status=$?
    trap '' PIPE
    exec 9>&-
    # Mostly the reader ends at once, and nobody needs to be woken to wait for it.
    i=0
    while [ "$i" -lt 50 ] && alive "$reader"; do i=$((i + 1)); done
    if [ "$timed_out" = 0 ] && [ "$i" = 50 ]; then
        echo ended >"$base.pid"
        kill -USR2 "$watchdog" || alarm=1
    fi
    while [ -z "$alarm" ] && alive "$reader"; do wait "$reader"; done
    find_output
    # A reader that has read its fill is busy with ending the command.
    if [ "$alarm" ] && [ "$(wc -c <"$out")" -ge $((cap * 1024)) ]; then
        while alive "$reader"; do wait "$reader"; done
    elif [ "$alarm" ] && alive "$reader"; then
        # The mark comes out of the pipe behind all that the command itself wrote.
        exec 5<>"$base.fifo"
        exec 9>"$base.fifo"
        exec 5<&-
        printf %s "$mark" >&9
        exec 9>&-
        i=0
        while [ "$i" -lt 20 ] && alive "$reader" && ! grep -q "$mark" "$out"; do
            sleep 0.05 || sleep 1
            i=$((i + 1))
        done
        alive "$reader" && sleep 0.02
        alive "$reader" && held=1
    fi
    ;;
file)
    exec 9>&7 7>&-
    launch
    status=$?
    exec 9>&-
    ;;
direct)
    exec 4>&1
    words=$(
        {
            { launch 9>&1 4>&-; echo $? >&3; } |
                { head -c "$keep" >&4; [ "$(head -c 1 | wc -c)" -eq 0 ] || { echo lost >&3; cat >/dev/null; }; }
        } 3>&1
    )
    for word in $words; do
        case $word in lost) lost=1 ;; *) status=$word ;; esac
    done
    ;;
esac
if [ "$watchdog" ] && [ "$timed_out" = 0 ]; then
    [ "$base" ] && echo over >"$base.pid"
    kill -USR1 "$watchdog"
fi
# It must not outlive this call, and it may have begun to kill when it was told: then it has said so before it ends.
while [ "$watchdog" ] && alive "$watchdog"; do
    if [ "$base" ] || [ "$timed_out" = 1 ]; then
        wait "$watchdog"
    else
        sleep 0.02
        kill -USR1 "$watchdog"
    fi
done
trap '' USR1 USR2
[ "$file" ] && rm -f "$file"

if [ "$base" ]; then
    find_output
    size=$(wc -c <"$out") || size=-1
    size=$((size))
    [ "$size" -ge $((cap * 1024)) ] && over=1
    if [ "$size" = -1 ]; then
        print_with_builtins
    elif [ "$size" -gt $((2 * keep)) ]; then
        head -c "$keep" "$out"
        gap=$((size - 2 * keep))
        lines=$(tail -c +$((keep + 1)) "$out" | head -c "$gap" | wc -l)
        printf '%s gap bytes=%s lines=%s\n' "$mark" "$gap" "$((lines))"
        tail -c "$keep" "$out"
    elif [ "$size" -gt 0 ]; then
        cat "$out"
    fi
    if [ "$size" -gt "$shown" ] || [ "$held" = 1 ]; then
        kept=$base.out
        report
        exec rm -f "$base.fifo" "$base.pid"
    fi
    report
    exec rm -f "$base.fifo" "$base.pid" "$base.out"
fi
report
