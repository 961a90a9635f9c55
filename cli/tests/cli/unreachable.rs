//! A daemon that is down, hangs or goes away.

use std::{os::unix::net::UnixListener, time::Duration};

use crate::fixture::{self, Daemon, npuctl, run};

#[test]
fn a_daemon_that_is_down_is_exit_4_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent.sock");
    let dead = dir.path().join("dead.sock");
    drop(UnixListener::bind(&dead).unwrap());
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    for (socket, why) in [(&absent, "no such file"), (&dead, "connection refused"), (&file, "it is no socket")] {
        for args in
            [&["devices"][..], &["claims", "list"], &["slices"], &["status"], &["vnpu", "list"], &["devices", "-w"]]
        {
            let expected = format!(
                "npuctl: cannot reach npu-dra at {}: {why}\n  \
                 Nobody listens there, and npu-dra was not looked for at its usual place, /run/npu-dra/admin.sock. \
                 Check --socket and NPUCTL_SOCKET against admin.socket of: npu-dra check-config\n",
                socket.display()
            );
            assert_eq!(run(&mut npuctl(socket, args)), (4, String::new(), expected), "{args:?}");
        }
    }
}

#[test]
fn a_user_who_is_not_root_never_gets_the_records() {
    if fixture::is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut command = npuctl(&dir.path().join("absent.sock"), &["devices"]);
    let (code, data, words) = run(command.env("NPUCTL_STATE_DIR", dir.path()));
    assert_eq!((code, data.as_str()), (4, ""));
    assert!(!words.contains("offline"), "{words}");
}

#[test]
fn root_is_told_when_the_records_cannot_be_read_either() {
    if !fixture::is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("state"), "a file").unwrap();
    let mut command = npuctl(&dir.path().join("absent.sock"), &["devices"]);
    let (code, data, words) = run(command.env("NPUCTL_STATE_DIR", dir.path().join("state")));
    assert_eq!((code, data.as_str()), (4, ""));
    assert!(words.contains("\n  Its records cannot be read either: "), "{words}");
}

#[test]
fn our_own_version_is_told_even_if_the_daemon_is_down() {
    let dir = tempfile::tempdir().unwrap();
    let (code, data, words) = run(&mut npuctl(&dir.path().join("absent.sock"), &["version"]));
    assert_eq!(code, 4);
    assert_eq!(data, format!("npuctl    {}\nnpu-dra   does not answer\n", env!("CARGO_PKG_VERSION")));
    assert!(words.starts_with("npuctl: cannot reach npu-dra"), "{words}");
}

#[test]
fn a_daemon_that_does_not_answer_is_exit_4_after_the_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("deaf.sock");
    let _deaf = UnixListener::bind(&socket).unwrap();
    for args in [&["devices", "--timeout", "100ms"][..], &["claims", "list", "-w", "--timeout", "100ms"]] {
        let (code, _, words) = run(&mut npuctl(&socket, args));
        let expected = format!("npuctl: npu-dra at {} did not answer within 100ms\n", socket.display());
        assert_eq!(code, 4, "{words}");
        assert!(words.starts_with(&expected), "{words}");
    }
}

#[test]
fn another_service_behind_the_socket_is_not_said_to_be_an_older_npu_dra() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("health.sock");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = {
        let _guard = runtime.enter();
        tokio::net::UnixListener::bind(&socket).unwrap()
    };
    let incoming = futures::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| stream);
        Some((accepted, listener))
    });
    let other = tonic::transport::Server::builder().add_routes(tonic::service::Routes::default());
    runtime.spawn(async move { other.serve_with_incoming(Box::pin(incoming)).await });
    let (code, _, words) = run(&mut npuctl(&socket, &["devices"]));
    assert_eq!(code, 1, "{words}");
    assert!(words.contains("\n  It is not the admin socket of npu-dra, or npu-dra is older"), "{words}");
    runtime.shutdown_background();
}

#[test]
fn an_error_is_written_in_one_piece() {
    let dir = tempfile::tempdir().unwrap();
    for args in [&["slices"][..], &["slices", "--nonsense"], &["claims", "release", "a"]] {
        // Each write to such a socket is a message of its own.
        let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let mut command = npuctl(&dir.path().join("absent.sock"), args);
        let status = command.stderr(std::os::fd::OwnedFd::from(theirs)).status().unwrap();
        drop(command);
        assert!(!status.success());
        let mut text = [0; 4096];
        let size = ours.recv(&mut text).unwrap();
        assert!(text[..size].ends_with(b"\n") && text[..size].contains(&b' '), "{args:?}");
        ours.set_nonblocking(true).unwrap();
        assert!(!ours.recv(&mut text).is_ok_and(|size| size > 0), "{args:?}: more than one write");
    }
}

#[test]
fn something_else_behind_the_socket_is_exit_4() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("other.sock");
    let other = UnixListener::bind(&socket).unwrap();
    let answering = std::thread::spawn(move || {
        use std::io::Write as _;
        let (mut stream, _) = other.accept().unwrap();
        let _ = stream.write_all(b"220 this is not gRPC\r\n");
    });
    let (code, _, words) = run(&mut npuctl(&socket, &["devices"]));
    assert_eq!(code, 4, "{words}");
    answering.join().unwrap();
}

#[test]
fn a_daemon_that_stops_ends_a_watch_with_exit_4() {
    let daemon = Daemon::start();
    let mut command = daemon.npuctl(&["devices", "--watch"]);
    let watching = crate::watch::Watching::start(&mut command);
    assert_eq!(watching.take(6).len(), 6);
    daemon.stop();
    let (code, words) = watching.end(Duration::from_secs(20));
    assert_eq!(code, 4);
    assert!(words.contains("lost the connection to npu-dra"), "{words}");
}
