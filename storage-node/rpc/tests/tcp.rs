//! The two ends of the transport over a real socket.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by the one, and its numbers are small"
)]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chain::id::InodeId;
use rpc::conn::{Connection, Pool};
use rpc::message::Request;
use rpc::message::meta::{GetAttributes, ReadSymlink, SymlinkTarget};
use rpc::serve::{Call, Handler, Reply, serve};
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
async fn a_broken_connection_fails_what_is_under_way() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let pool = Pool::new();
    let accept = tokio::spawn(async move { drop(listener.accept().await.unwrap()) });
    let error = pool.call(&address, &link(1), Bytes::new(), SOON).await.unwrap_err();
    accept.await.unwrap();
    assert_eq!(error.code, Code::Unreachable);
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
