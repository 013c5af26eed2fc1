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
read -r self _ _ _ own_group _ </proc/self/stat

# What has happened, in lines that are only appended, so that all of us see the same order: the number of the command's
# first process; `late`, the deadline has passed; `ended`, the command has, and its output is waited for; `over`, the
# call is. The first of those three decides whether the command has timed out. `full`: the watchdog could not start a
# `sleep`, and killed what commands had left running.
read_log() {
    pid= ruling= closed=
    while read -r line; do
        case $line in
        late | ended | over) ruling=${ruling:-$line} ;;
        full) exhausted=1 ;;
        *) pid=$line ;;
        esac
        [ "$line" = over ] && closed=1
    done <"$log"
}

# The command's first process leads its session and group; what left the group still carries the mark in its
# environment. The watchdog must not be ended in the middle of this.
slay() {
    trap '' USR1 USR2
    slain=1
    read_log
    if [ "$pid" ]; then
        read_process "$pid"
        begun=$started
        kill -TERM -"$pid" || { [ "$begun" ] && kill -TERM "$pid"; }
        i=0
        # Where no process can be started, the shell would wait long for one.
        while [ "$i" -lt 10 ] && kill -0 -"$pid" && ! is_full; do
            sleep 0.1 || sleep 1
            i=$((i + 1))
        done
    fi
    # Other shells than bash read byte by byte, which takes long where there are many processes.
    [ "$BASH_VERSION" ] || { grep -qsz . /proc/$$/environ && grep=1; }
    slay_now "$id"
    slain=
}

# The state, parent and group of process $1, and when it was started; empty if there is none.
read_process() {
    state= parent= group_of= started= line=
    read -r line <"/proc/$1/stat" || return
    # Its name may hold anything.
    set -- ${line##*) }
    state=$1 parent=$2 group_of=$3 started=${20}
}

# Whether the environment in file $1 carries the mark of call $2, or of any: this script names the variable, too.
is_marked() {
    while IFS= read -r line || [ "$line" ]; do
        case $line in *HARBOR_TRL_EXEC=${2:-[0-9a-f]}*) return 0 ;; esac
    done <"$1"
    return 1
}

# Marked by: $1, or any call.
slay_now() {
    if [ "$pid" ]; then
        # When it and its group have ended, its number may be somebody else's.
        read_process "$pid"
        if [ -z "$started" ] || [ "$started" = "$begun" ]; then
            kill -KILL -"$pid" || { [ "$started" ] && kill -KILL "$pid"; }
        else
            pid=
        fi
    fi
    for pass in 1 2 3; do
        found=
        environs='/proc/[0-9]*/environ'
        [ "$grep" ] && environs=$(grep -lsz "HARBOR_TRL_EXEC=${1:-[0-9a-f]}" $environs)
        for environ in $environs; do
            is_marked "$environ" "$1" || continue
            process=${environ%/environ}
            read_process "${process#/proc/}" || continue
            # It may have ended meanwhile, and its number be another's.
            is_marked "$environ" "$1" || continue
            # Its group too: a fork bomb is faster than this loop.
            [ "$group_of" -gt 1 ] && [ "$group_of" != "$own_group" ] && kill -KILL -"$group_of"
            kill -KILL "${process#/proc/}" && found=1
        done
        [ "$found" ] || break
    done
    # Processes of another user are out of reach, unless sudo asks for no password.
    [ "$pid" ] && command -v sudo >/dev/null && for process in /proc/[0-9]*; do
        read_process "${process#/proc/}"
        if [ "$group_of" = "$pid" ] && [ "$state" != Z ]; then
            sudo -n kill -KILL -- -"$pid" </dev/null >/dev/null
            break
        fi
    done
}

find_output() {
    out=$base.out
    [ -e "$out" ] || out=/proc/$$/fd/8
}

# Whether this child runs. Not a zombie, which `kill -0` takes for alive, nor another process that has its number by now:
# bash waits for children unasked.
alive() {
    kill -0 "$1" || return 1
    read_process "$1" || parent=$self
    [ "$state" != Z ] && [ "$parent" = "$self" ]
}

# Signal $1 to the shell that we are a child of, if it still is there.
tell() {
    read -r _ _ _ parent _ </proc/self/stat || parent=$$
    [ "$parent" = $$ ] && kill -"$1" $$
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

# Whether this container may hardly start any more processes. cgroup v2, v1.
is_full() {
    for directory in /sys/fs/cgroup /sys/fs/cgroup/pids; do
        read -r processes <"$directory/pids.current" && read -r most <"$directory/pids.max" && [ "$most" != max ] &&
            [ "$((processes + 8))" -gt "$most" ] && return
    done
    return 1
}

# What this command or an earlier one left running is the likely reason. Bash tries for a quarter of a minute to start a
# process, so this is asked before.
make_room_if_full() { is_full && make_room; }

make_room() {
    read_log
    # The first process has ended: if there is one of its number, that is another.
    begun=
    slay_now
    exhausted=1
}

# The command in a session of its own, output to descriptor 9. In the foreground: a shell starts background processes
# with SIGINT ignored, and they could not get rid of that.
launch() (
    { read -r pid _ </proc/self/stat || pid=$(exec sh -c 'echo "$PPID"'); } && echo "$pid" >>"$log"
    # A watchdog that fired before has seen no process.
    read_log
    [ "$ruling" ] && exit 124
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

# The call is over for the watchdog, if it has not begun to kill.
dismiss() {
    echo over >>"$log"
    alive "$watchdog" && kill -USR1 "$watchdog"
}

# A signal may come from anybody.
rule() {
    read_log
    case $ruling in
    late) timed_out=1 ;;
    ended | over) timed_out=0 ;;
    esac
}

report() {
    count_oom_kills
    printf '%s rc=%s size=%s timed_out=%s over=%s lost=%s exhausted=%s held=%s ooms=%s mode=%s shell=%s group=%s file=%s end\n' "$mark" \
        "$status" "${size:-0}" "$timed_out" "${over:-0}" "$lost" "${exhausted:-0}" "$held" "$((oom_kills - oom_before))" \
        "$mode" "$shell" "$group" "$kept"
    reported=1
}

# A shell that cannot fork ends here.
emergency() {
    self=
    read -r self _ </proc/self/stat
    case $reported$self in '' | $$) ;; *) return ;; esac
    trap '' USR1 USR2
    make_room
    print_with_builtins
    status=${status:-125}
    dismiss
    rule
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
    printf x >"$base.out" && echo >"$base.log" && break
    rm -f "$base.out" "$base.log"
    base=
done
log=/dev/null
if [ "$base" ]; then
    # Whoever removes the files does not take the output with them.
    exec 6<"$base.log" 7>"$base.out" 8<"$base.out"
    log=/proc/self/fd/6
    [ -e "$log" ] || log=$base.log
    trap emergency EXIT
else
    exec 6</dev/null 7>/dev/null 8</dev/null
fi
make_room_if_full

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
    read -r self _ </proc/self/stat
    end_sleep() { alive $! && kill $!; }
    # A signal sent before the handlers stood is lost, but what it said is in the log.
    look_up() {
        read_log
        [ "$closed" ] && [ "$ruling" != late ] && { end_sleep; exit 0; }
        :
    }
    # What is to become `sleep` comes here, too, when it is ended before; bash then takes the first `[` for true.
    leave() {
        read -r own _ </proc/self/stat
        case $own in "$self") ;; *) return ;; esac
        read_log
        if [ "$slain" ]; then
            grep=
            slay_now "$id"
        elif [ "$base" ] && [ -z "$ruling" ]; then
            echo full >>"$log"
            make_room
        fi
        tell USR2
    }
    trap leave EXIT
    trap : TERM INT HUP
    trap 'end_sleep; exit 0' USR1
    # Ends the sleep, not only the wait: it may come before that.
    trap end_sleep USR2
    read_clock
    end=$((now + seconds))
    while :; do
        sleep "$((end - now))" &
        look_up
        [ "$ruling" ] || wait $!
        look_up
        # The command may end all that is called `sleep`.
        read_clock
        { [ "$ruling" ] || [ "${now:-$end}" -ge "$end" ]; } && break
    done
    trap '' USR1 USR2
    echo late >>"$log"
    look_up
    if [ "$ruling" = ended ]; then
        end_sleep
        trap 'end_sleep; exit 0' USR1
        # If its output does not end soon, a background process holds it.
        while look_up; do
            sleep 0.2 &
            wait $!
            tell USR2 || exit 0
        done
    fi
    tell USR1
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
    make_room_if_full
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
            tell ALRM
            cat <&4
        fi
    ) &
    reader=$!
    exec 4<&- 7>&-
    make_room_if_full
    launch
    status=$?
    trap '' PIPE
    exec 9>&-
    # Mostly the reader ends at once, and nobody needs to be woken to wait for it.
    i=0
    while [ "$i" -lt 50 ] && alive "$reader"; do
        make_room_if_full
        i=$((i + 1))
    done
    if [ "$i" = 50 ]; then
        echo ended >>"$log"
        alive "$watchdog" && kill -USR2 "$watchdog" || alarm=1
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
dismiss
# It must not outlive this call, and it may have begun to kill when it was told.
while [ "$watchdog" ] && alive "$watchdog"; do
    if [ "$base" ] || [ "$timed_out" = 1 ]; then
        wait "$watchdog"
    else
        sleep 0.02
        kill -USR1 "$watchdog"
    fi
done
trap '' USR1 USR2
rule
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
        exec rm -f "$base.fifo" "$base.log"
    fi
    report
    exec rm -f "$base.fifo" "$base.log" "$base.out"
fi
report
