//! The two ends of the transport over a real socket.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by the one, and its numbers are small"
)]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chain::id::InodeId;
use rpc::codec::Wire;
use rpc::conn::{Connection, Pool};
use rpc::frame::Kind;
use rpc::message::Request;
use rpc::message::meta::{GetAttributes, ReadSymlink, SymlinkTarget};
use rpc::serve::{Call, Handler, Reply, serve};
use rpc::transport::{Frame, read_frame, write_frame};
use rpc::{Code, Error};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

struct Echo;

impl Handler for Echo {
    async fn handle(&self, call: Call) -> Result<Reply, Error> {
        if call.kind != ReadSymlink::KIND {
            return Err(call.unknown());
        }
        let request: ReadSymlink = call.decode()?;
        match request.inode.get() {
            0 => std::future::pending().await,
            u64::MAX => Err(Error::new(Code::NotFound, "no such inode").with_detail(404)),
            n => {
                let target = Bytes::from(n.to_string());
                Ok(Reply::with_payload(&SymlinkTarget { target }, call.payload))
            }
        }
    }
}

async fn server() -> (String, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(serve(listener, Arc::new(Echo), stopped));
    (address, stop)
}

fn link(inode: u64) -> ReadSymlink {
    ReadSymlink { inode: InodeId::new(inode) }
}

const SOON: Duration = Duration::from_secs(10);

#[tokio::test]
async fn many_requests_share_a_connection_and_get_their_own_answers() {
    let (address, _stop) = server().await;
    let connection = Arc::new(Connection::connect(&address).await.unwrap());
    let calls = (1..=500u64).map(|n| {
        let connection = Arc::clone(&connection);
        tokio::spawn(async move {
            let payload = Bytes::from(vec![n as u8; n as usize * 37]);
            let (head, back) = connection.call(&link(n), payload.clone(), SOON).await.unwrap();
            assert_eq!(head.target, Bytes::from(n.to_string()));
            assert_eq!(back, payload);
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
}

#[tokio::test]
async fn errors_carry_code_detail_and_message() {
    let (address, _stop) = server().await;
    let pool = Pool::new();
    let not_found = pool.call(&address, &link(u64::MAX), Bytes::new(), SOON).await.unwrap_err();
    assert_eq!(not_found, Error::new(Code::NotFound, "no such inode").with_detail(404));
    let other = GetAttributes { inode: InodeId::new(1) };
    let unknown = pool.call(&address, &other, Bytes::new(), SOON).await.unwrap_err();
    assert_eq!(unknown.code, Code::UnknownKind);
}

#[tokio::test]
async fn a_silent_server_is_a_timeout_and_the_pool_connects_anew() {
    let (address, _stop) = server().await;
    let pool = Pool::new();
    let first = pool.get(&address).await.unwrap();
    let short = Duration::from_millis(50);
    let error = pool.call(&address, &link(0), Bytes::new(), short).await.unwrap_err();
    assert_eq!(error.code, Code::Timeout);
    let second = pool.get(&address).await.unwrap();
    assert!(!Arc::ptr_eq(&first, &second));
    assert!(pool.call(&address, &link(1), Bytes::new(), SOON).await.is_ok());
}

#[tokio::test]
async fn a_connection_with_one_late_answer_is_kept_while_others_come_and_no_longer() {
    let (address, _stop) = server().await;
    let pool = Pool::new();
    let first = pool.get(&address).await.unwrap();
    let limit = Duration::from_secs(2);
    let (unanswered, answered) = (link(0), link(1));
    let slow = pool.call(&address, &unanswered, Bytes::new(), limit);
    // Others are answered until it is late.
    let mut slow = std::pin::pin!(slow);
    let late = loop {
        tokio::select! {
            late = &mut slow => break late,
            other = pool.call(&address, &answered, Bytes::new(), SOON) => drop(other.unwrap()),
        }
    };
    assert_eq!(late.unwrap_err().code, Code::Timeout);
    assert!(Arc::ptr_eq(&first, &pool.get(&address).await.unwrap()));
    // Answered before, and not since.
    let late = pool.call(&address, &unanswered, Bytes::new(), limit).await;
    assert_eq!(late.unwrap_err().code, Code::Timeout);
    assert!(!Arc::ptr_eq(&first, &pool.get(&address).await.unwrap()));
}

#[tokio::test]
async fn a_broken_connection_fails_what_is_under_way() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let pool = Pool::new();
    let accept = tokio::spawn(async move { drop(listener.accept().await.unwrap()) });
    let error = pool.call(&address, &link(1), Bytes::new(), SOON).await.unwrap_err();
    accept.await.unwrap();
    assert_eq!(error.code, Code::Unreachable);
}

/// A server in the test's hands: its end of the one connection, and the caller's.
async fn by_hand() -> (TcpStream, Arc<Connection>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let caller = tokio::spawn(async move { Connection::connect(&address).await.unwrap() });
    let (server, _) = listener.accept().await.unwrap();
    (server, Arc::new(caller.await.unwrap()))
}

fn call(
    connection: &Arc<Connection>,
    inode: u64,
) -> tokio::task::JoinHandle<Result<(SymlinkTarget, Bytes), Error>> {
    let connection = Arc::clone(connection);
    tokio::spawn(async move { connection.call(&link(inode), Bytes::new(), SOON).await })
}

async fn answer(server: &mut TcpStream, kind: Kind, id: u64, text: &'static str) {
    let head = SymlinkTarget { target: text.into() }.to_bytes();
    let mut frame = Frame::new(kind, id, head, Bytes::new()).unwrap();
    frame.header.response = true;
    write_frame(server, &frame).await.unwrap();
}

#[tokio::test]
async fn an_answer_to_nobody_is_passed_over_and_a_second_one_too() {
    let (mut server, connection) = by_hand().await;
    let first = call(&connection, 1);
    let id = read_frame(&mut server).await.unwrap().unwrap().header.request_id;
    answer(&mut server, ReadSymlink::KIND, id + 1_000, "nobody's").await;
    answer(&mut server, ReadSymlink::KIND, id, "first").await;
    answer(&mut server, ReadSymlink::KIND, id, "again").await;
    assert_eq!(first.await.unwrap().unwrap().0.target, "first");
    let second = call(&connection, 2);
    let id = read_frame(&mut server).await.unwrap().unwrap().header.request_id;
    answer(&mut server, ReadSymlink::KIND, id, "second").await;
    assert_eq!(second.await.unwrap().unwrap().0.target, "second");
}

#[tokio::test]
async fn an_answer_of_another_kind_is_no_answer() {
    let (mut server, connection) = by_hand().await;
    let asked = call(&connection, 1);
    let id = read_frame(&mut server).await.unwrap().unwrap().header.request_id;
    answer(&mut server, GetAttributes::KIND, id, "looks right").await;
    let error = asked.await.unwrap().unwrap_err();
    assert!(error.code == Code::Internal && error.message.contains("0x030a"), "{error}");
}

#[tokio::test]
async fn a_connection_that_drops_fails_each_caller_once() {
    let (mut server, connection) = by_hand().await;
    let calls: Vec<_> = (1..=300).map(|n| call(&connection, n)).collect();
    let mut asked = std::collections::BTreeSet::new();
    for _ in 0..300 {
        let frame = read_frame(&mut server).await.unwrap().unwrap();
        assert!(asked.insert(frame.header.request_id), "sent twice");
    }
    let answered = *asked.first().unwrap();
    answer(&mut server, ReadSymlink::KIND, answered, "in time").await;
    // Half a header: the connection breaks inside of a frame.
    server.write_all(b"LMPY\x01").await.unwrap();
    drop(server);
    let (mut good, mut failed) = (0, 0);
    for call in calls {
        match call.await.unwrap() {
            Ok(_) => good += 1,
            Err(error) => {
                assert_eq!(error.code, Code::Unreachable, "{error}");
                failed += 1;
            }
        }
    }
    assert_eq!((good, failed), (1, 299));
    assert!(!connection.is_open());
    let late = call(&connection, 301).await.unwrap().unwrap_err();
    assert_eq!(late.code, Code::Unreachable);
}

#[tokio::test]
async fn callers_hear_that_the_connection_broke_though_the_peer_reads_no_more() {
    let (mut server, connection) = by_hand().await;
    // More than socket and queue hold: most of the callers still wait to send.
    let calls: Vec<_> = (1..=600)
        .map(|n| {
            let connection = Arc::clone(&connection);
            let payload = Bytes::from(vec![0; 64 << 10]);
            tokio::spawn(async move { connection.call(&link(n), payload, 60 * SOON).await })
        })
        .collect();
    read_frame(&mut server).await.unwrap().unwrap();
    server.write_all(&[0x55; 64]).await.unwrap();
    for call in calls {
        let ended = tokio::time::timeout(SOON, call).await.expect("a caller waits on");
        assert_eq!(ended.unwrap().unwrap_err().code, Code::Unreachable);
    }
}

#[tokio::test]
async fn a_server_that_asks_instead_of_answering_is_left() {
    let (mut server, connection) = by_hand().await;
    let asked = call(&connection, 1);
    let frame = read_frame(&mut server).await.unwrap().unwrap();
    write_frame(&mut server, &frame).await.unwrap();
    assert_eq!(asked.await.unwrap().unwrap_err().code, Code::Unreachable);
    assert!(!connection.is_open());
}

#[tokio::test]
async fn garbage_closes_the_connection_and_no_other() {
    let (address, _stop) = server().await;
    let mut raw = TcpStream::connect(&address).await.unwrap();
    raw.write_all(&[0x55; 200]).await.unwrap();
    let mut rest = Vec::new();
    let end = tokio::io::AsyncReadExt::read_to_end(&mut raw, &mut rest).await;
    assert!(rest.is_empty() && end.map_or(true, |n| n == 0));
    assert!(Pool::new().call(&address, &link(1), Bytes::new(), SOON).await.is_ok());
}
