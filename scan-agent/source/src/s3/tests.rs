use std::time::Instant;

use super::*;
use endpoint::{Answer, Endpoint, error, object, page, part, response};

mod endpoint;

const ETAG: &str = "ETag: \"e\"\r\n";

fn says(failure: &Failure, reason: Reason, message: &str) {
    assert_eq!((failure.reason, failure.message.as_str()), (reason, message));
}

#[test]
fn the_code_of_an_error_document_is_found() {
    let body = "<Error><Code>NoSuchBucket</Code><Message>x</Message></Error>";
    assert_eq!(element("Code", body).as_deref(), Some("NoSuchBucket"));
    assert_eq!(element("Message", body).as_deref(), Some("x"));
    assert_eq!(element("Code", "<Code>"), None);
    let quoted = "<Message>&#34;a&quot; &lt; &#39;&amp;lt;&apos;</Message>";
    assert_eq!(element("Message", quoted).as_deref(), Some(r#""a" < '&lt;'"#));
    assert_eq!(status_of("status code: 403 Forbidden: x"), Some(403));
    assert_eq!(status_of("no number"), None);
}

#[tokio::test]
async fn refused_signatures_are_told_apart_from_forbidden_paths() {
    let cases = [
        ("403 Forbidden", "RequestTimeTooSkewed", "The difference is too large.", true),
        ("403 Forbidden", "RequestExpired", "The request expired.", true),
        ("400 Bad Request", "ExpiredToken", "The token has expired.", true),
        ("400 Bad Request", "AuthorizationHeaderMalformed", "the region 'x' is wrong", true),
        ("403 Forbidden", "AccessDenied", "Access Denied", false),
    ];
    for (status, code, message, is_signature) in cases {
        let answer = error(status, code, message);
        let endpoint = Endpoint::start(move |_, _| Answer::Keep(answer.clone())).await;
        let reason = if is_signature { Reason::InvalidCredentials } else { Reason::AccessDenied };
        let failure = endpoint.source().list().await.unwrap_err();
        says(&failure, reason, &format!("list s3://b/d: {code}: {message}"));
        let failure = endpoint.source().read(&object(), 0..10).await.unwrap_err();
        says(&failure, reason, &format!("get a of s3://b/d: {code}: {message}"));
        assert_eq!(endpoint.seen().len(), 2, "{code} is not tried again");
    }
}

#[tokio::test]
async fn a_storm_of_slow_down_ends_after_few_tries_and_soon() {
    let storm = error("503 Slow Down", "SlowDown", "Please reduce your request rate.");
    let endpoint = Endpoint::start(move |_, _| Answer::Keep(storm.clone())).await;
    let since = Instant::now();
    let failure = endpoint.source().list().await.unwrap_err();
    let message = "list s3://b/d: SlowDown: Please reduce your request rate.";
    says(&failure, Reason::StoreUnavailable, message);
    assert_eq!(endpoint.seen().len(), 1 + RETRY.max_retries);
    let failure = endpoint.source().read(&object(), 0..10).await.unwrap_err();
    let message = "get a of s3://b/d: SlowDown: Please reduce your request rate.";
    says(&failure, Reason::StoreUnavailable, message);
    assert_eq!(endpoint.seen().len(), 2 * (1 + RETRY.max_retries));
    assert!(since.elapsed() < PATIENCE, "{:?}", since.elapsed());
}

#[tokio::test]
async fn a_short_storm_does_not_show() {
    let endpoint = Endpoint::start(|_, before| {
        Answer::Keep(match before {
            0 | 1 => error("503 Slow Down", "SlowDown", "x"),
            _ => part("bytes 0-9/10", 10, ETAG) + "0123456789",
        })
    })
    .await;
    assert_eq!(&endpoint.source().read(&object(), 0..10).await.unwrap()[..], b"0123456789");
    assert_eq!(endpoint.seen().len(), 3);
}

#[tokio::test]
async fn a_redirect_without_a_place_names_the_region_and_the_endpoint() {
    let body = "<Error><Code>PermanentRedirect</Code></Error>";
    let bare = response("301 Moved Permanently", "x-amz-bucket-region: eu-1\r\n", body);
    let round = |_: &str, _| Answer::Keep(response("307 Temporary", "Location: /b\r\n", ""));
    let endpoints = [
        Endpoint::start(move |_, _| Answer::Keep(bare.clone())).await,
        Endpoint::start(round).await,
    ];
    let why = "the endpoint redirects: the bucket is in another region or at another endpoint";
    for endpoint in endpoints {
        let failure = endpoint.source().list().await.unwrap_err();
        says(&failure, Reason::BucketNotFound, &format!("list s3://b/d: {why}"));
        let failure = endpoint.source().read(&object(), 0..10).await.unwrap_err();
        says(&failure, Reason::BucketNotFound, &format!("get a of s3://b/d: {why}"));
    }
}

#[tokio::test]
async fn a_redirect_to_a_place_is_followed_without_the_signature() {
    let other =
        Endpoint::start(|_, _| Answer::Keep(part("bytes 0-9/10", 10, ETAG) + "0123456789")).await;
    // Another host: the signature was made for the first one.
    let place = other.url().replace("127.0.0.1", "localhost");
    let first = Endpoint::start(move |_, _| {
        Answer::Keep(response("307 Temporary", &format!("Location: {place}/b/d/a\r\n"), ""))
    })
    .await;
    assert_eq!(&first.source().read(&object(), 0..10).await.unwrap()[..], b"0123456789");
    let has_signature = |seen: &[String]| seen[0].to_lowercase().contains("authorization:");
    assert!(has_signature(&first.seen()), "{:?}", first.seen());
    assert!(!has_signature(&other.seen()), "{:?}", other.seen());
}

/// Four of the ten bytes that were promised, and then no more of them however often they are asked.
#[tokio::test]
async fn fewer_bytes_than_promised_are_the_endpoints_fault_after_a_few_tries() {
    let endpoint = Endpoint::start(|_, before| {
        Answer::Close(match before {
            0 => part("bytes 0-9/10", 10, ETAG) + "0123",
            _ => part("bytes 4-9/10", 6, ETAG),
        })
    })
    .await;
    let failure = endpoint.source().read(&object(), 0..10).await.unwrap_err();
    let message = "get a of s3://b/d: end of file before message length reached";
    says(&failure, Reason::StoreUnavailable, message);
    let seen = endpoint.seen();
    assert_eq!(seen.len(), 1 + RETRY.max_retries);
    let asked =
        |head: &String| head.contains("range: bytes=4-9") && head.contains("if-match: \"e\"");
    assert!(seen.iter().skip(1).all(asked), "{seen:?}");
}

#[tokio::test]
async fn bytes_behind_the_promised_ones_are_never_taken_for_an_answer() {
    let endpoint = Endpoint::start(|_, _| {
        Answer::Keep(part("bytes 0-9/10", 10, ETAG) + "0123456789HTTP/1.1 200 OK\r\n\r\n")
    })
    .await;
    let source = endpoint.source();
    for _ in 0..3 {
        assert_eq!(&source.read(&object(), 0..10).await.unwrap()[..], b"0123456789");
    }
}

#[tokio::test]
async fn a_body_of_the_wrong_length_is_refused_and_one_without_end_is_not_read() {
    let chunked = part("bytes 0-9/10", 10, &format!("{ETAG}Transfer-Encoding: chunked\r\n"));
    let of = |text: String| Answer::Keep(text);
    for (answer, got) in [
        (of(part("bytes 0-9/10", 4, ETAG) + "0123"), "4"),
        (of(part("bytes 0-9/10", 12, ETAG) + "0123456789ab"), "more than 10"),
        (of(format!("{chunked}4\r\n0123\r\n0\r\n\r\n")), "4"),
        (Answer::Repeat(chunked.clone(), "4\r\n0123\r\n"), "more than 10"),
    ] {
        let endpoint = Endpoint::start(move |_, _| answer.clone()).await;
        let failure = endpoint.source().read(&object(), 0..10).await.unwrap_err();
        let message = format!("get a of s3://b/d: the answer has {got} bytes instead of 10");
        says(&failure, Reason::StoreUnavailable, &message);
    }
}

#[tokio::test]
async fn another_range_than_asked_is_refused() {
    for (range, why) in [
        ("bytes 1-10/11", "Requested 0..10, got 1..11"),
        ("bytes 0-8/10", "Requested 0..10, got 0..9"),
        (
            "bytes nine-ten/10",
            "Failed to parse value for CONTENT_RANGE header: \"bytes nine-ten/10\"",
        ),
    ] {
        let answer = part(range, 10, ETAG) + "0123456789";
        let endpoint = Endpoint::start(move |_, _| Answer::Keep(answer.clone())).await;
        let failure = endpoint.source().read(&object(), 0..10).await.unwrap_err();
        says(&failure, Reason::StoreUnavailable, &format!("get a of s3://b/d: {why}"));
    }
    let headers = format!("{ETAG}Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\n");
    let whole = response("200 OK", &headers, "0123456789");
    let endpoint = Endpoint::start(move |_, _| Answer::Keep(whole.clone())).await;
    let failure = endpoint.source().read(&object(), 2..5).await.unwrap_err();
    let message = "get a of s3://b/d: Received non-partial response when range requested";
    says(&failure, Reason::StoreUnavailable, message);
}

#[tokio::test]
async fn an_answer_with_another_etag_or_none_is_not_the_object() {
    let read = async |etag: &str| {
        let answer = part("bytes 0-9/10", 10, etag) + "0123456789";
        let endpoint = Endpoint::start(move |_, _| Answer::Keep(answer.clone())).await;
        endpoint.source().read(&object(), 0..10).await
    };
    for same in ["ETag: \"e\"\r\n", "ETag: e\r\n", "ETag: W/\"e\"\r\n"] {
        assert_eq!(&read(same).await.unwrap()[..], b"0123456789", "{same}");
    }
    let message = "a of s3://b/d is not the object that was listed";
    says(&read("ETag: \"f\"\r\n").await.unwrap_err(), Reason::DatasetChanged, message);
    let message = "get a of s3://b/d: the answer has no ETag";
    says(&read("").await.unwrap_err(), Reason::StoreUnavailable, message);
}

#[tokio::test]
async fn an_object_listed_without_an_etag_is_not_left_out_quietly() {
    let endpoint = Endpoint::start(|_, _| Answer::Keep(page(""))).await;
    let failure = endpoint.source().list().await.unwrap_err();
    let message = "d/a of s3://b/d was listed without an ETag";
    says(&failure, Reason::StoreUnavailable, message);
    let endpoint = Endpoint::start(|_, _| Answer::Keep(page("<ETag>\"e\"</ETag>"))).await;
    assert_eq!(endpoint.source().list().await.unwrap()[0].path, "a");
}

#[tokio::test]
async fn the_words_of_an_endpoint_are_cut_short() {
    let long = "no ".repeat(1000);
    for (answer, start) in [
        (error("400 Bad Request", "InvalidRequest", &long), "InvalidRequest: no no no"),
        (response("404 Not Found", "", &format!("<html>{long}</html>")), "HTTP status 404"),
    ] {
        let endpoint = Endpoint::start(move |_, _| Answer::Keep(answer.clone())).await;
        let failure = endpoint.source().list().await.unwrap_err();
        let said = failure.message.strip_prefix("list s3://b/d: ").unwrap();
        assert!(said.starts_with(start) && said.len() <= MAX_QUOTED, "{said}");
    }
}

#[tokio::test]
async fn an_endpoint_that_never_comes_to_an_end_is_given_up() {
    let empty = "<ListBucketResult><IsTruncated>true</IsTruncated>\
        <NextContinuationToken>again</NextContinuationToken></ListBucketResult>";
    let endpoint = Endpoint::start(move |_, _| Answer::Keep(response("200 OK", "", empty))).await;
    let mut source = endpoint.source();
    source.patience = Duration::from_millis(300);
    let failure = source.list().await.unwrap_err();
    says(&failure, Reason::StoreUnavailable, "list s3://b/d: not done after 300ms");

    // The head of an answer, and then nothing that ends it.
    let endpoint =
        Endpoint::start(|_, _| Answer::Keep(part("bytes 0-9/10", 10, ETAG) + "0123")).await;
    let mut source = endpoint.source();
    source.patience = Duration::from_millis(300);
    let failure = source.read(&object(), 0..10).await.unwrap_err();
    says(&failure, Reason::StoreUnavailable, "get a: not done after 300ms");
}
