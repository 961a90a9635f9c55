# Runs inside the service's sandbox (ExecStartPre= of a drop-in) and tells what it can do: one line a fact, "name yes|no".
#   probe.pl FILE [walk]     walk: also each directory in which a file can be made
use strict;
use warnings;
use Fcntl;
use Socket;

my ($file, $walk) = @ARGV;
my @facts;
sub fact { my ($name, $yes) = @_; push @facts, "$name " . ($yes ? 'yes' : 'no'); }
sub run { return system(@_, ) == 0; }
sub quiet { my ($command) = @_; return system('/bin/sh', '-c', "$command >/dev/null 2>&1") == 0; }
sub create {
    my ($path) = @_;
    sysopen(my $handle, $path, O_CREAT | O_WRONLY, 0600) or return 0;
    return close $handle;
}

fact('vnpu-list', create('/etc/vnpu.cfg.new') && rename('/etc/vnpu.cfg.new', '/etc/vnpu.cfg.probe') && unlink('/etc/vnpu.cfg.probe'));
fact('vnpu-lock', create('/run/vnpu_cfg_lock') && unlink('/run/vnpu_cfg_lock'));
fact('log', create('/var/log/npu-probe.log') && unlink('/var/log/npu-probe.log'));
fact('cdi', create('/etc/cdi/.probe') && unlink('/etc/cdi/.probe'));
fact('kubelet', create('/var/lib/kubelet/plugins/.probe') && unlink('/var/lib/kubelet/plugins/.probe'));
fact('state', create('/var/lib/npu-dra/.probe') && unlink('/var/lib/npu-dra/.probe'));
fact('shell', quiet('true'));
fact('foreign-node', sysopen(my $node, '/dev/probe-node', O_RDWR));

fact('mount', quiet('mount -t tmpfs probe /mnt'));
fact('mount-namespace', quiet('unshare --mount true'));
fact('user-namespace', quiet('unshare --user true'));
fact('packet-socket', socket(my $packet, 17, SOCK_DGRAM, 0));
fact('raw-socket', socket(my $raw, AF_INET, SOCK_RAW, 1));
fact('inet-socket', socket(my $inet, AF_INET, SOCK_STREAM, 0));
fact('make-node', quiet('mknod /run/npu-dra/probe-node c 1 3'));
create('/run/npu-dra/probe-setuid');
fact('setuid', chmod(04755, '/run/npu-dra/probe-setuid'));
unlink('/run/npu-dra/probe-setuid', '/run/npu-dra/probe-node');
fact('personality', quiet('setarch --addr-no-randomize true'));
open(my $pid, '<', '/packages/foreign.pid') or die "no foreign process: $!";
fact('others-processes', kill(0, int(<$pid>)));

open(my $status, '<', '/proc/self/status') or die "no status: $!";
for (<$status>) { push @facts, lc($1) . " $2" if /^(CapBnd|NoNewPrivs|Seccomp):\s+(\S+)/; }

if ($walk) {
    my @queue = ('/');
    while (defined(my $dir = shift @queue)) {
        next if $dir =~ m{^/(proc|sys)$};
        my $probe = ($dir eq '/' ? '' : $dir) . '/.npu-probe';
        if (create($probe)) { unlink $probe; push @facts, "writable $dir"; next; }
        opendir(my $handle, $dir) or next;
        for my $name (readdir $handle) {
            my $path = ($dir eq '/' ? '' : $dir) . "/$name";
            push @queue, $path if $name !~ /^\.\.?$/ && !-l $path && -d _ && ($path =~ tr{/}{}) < 5;
        }
    }
}
open(my $out, '>', $file) or die "cannot write $file: $!";
print $out "$_\n" for sort @facts;
close $out or die "cannot write $file: $!";
