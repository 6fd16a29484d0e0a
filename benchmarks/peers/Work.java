import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.security.DigestException;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicIntegerArray;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicLongArray;
import org.apache.kafka.clients.consumer.ConsumerRecord;

/** The work of the handler and its records of what ran: the same as in Python. */
final class Work {
    private static final int ROUNDS = 500;
    private static final int DIGITS = 8;

    private final String kind;
    private final long pause;
    private final FileChannel journal;
    private final AtomicIntegerArray[] marks;
    /** By key: the offset of its last record + 1, negative while it runs. */
    private final AtomicLongArray turns;
    private final AtomicInteger running = new AtomicInteger();
    final AtomicInteger peak = new AtomicInteger();
    final AtomicInteger done = new AtomicInteger();
    final AtomicInteger disordered = new AtomicInteger();
    final AtomicLong firstStarted = new AtomicLong();
    final AtomicLong lastEnded = new AtomicLong();
    private final AtomicLong lastStarted = new AtomicLong();
    /** Maximum nanoseconds from one start to the next; known with `sleep`. */
    final AtomicLong longestPause = new AtomicLong();

    Work(Spec spec) throws IOException {
        kind = spec.text("work");
        pause = Math.round(spec.seconds("seconds") * 1_000);
        journal = kind.equals("journal")
                ? FileChannel.open(
                        Path.of(spec.text("journal")), StandardOpenOption.CREATE, StandardOpenOption.APPEND)
                : null;
        int[] ends = spec.ends("ends");
        marks = new AtomicIntegerArray[ends.length];
        for (int partition = 0; partition < ends.length; partition++) {
            marks[partition] = new AtomicIntegerArray(ends[partition]);
        }
        turns = new AtomicLongArray(spec.number("keys"));
    }

    void handle(ConsumerRecord<byte[], byte[]> record) {
        try {
            if (kind.equals("journal")) {
                write(record);
            } else if (kind.equals("sleep")) {
                sleep(record);
            } else {
                observe(record);
            }
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
            throw new IllegalStateException(interrupted);
        }
    }

    private void write(ConsumerRecord<byte[], byte[]> record) throws InterruptedException {
        Thread.sleep(pause);
        // This clock is the machine's monotonic one, which Python reads too.
        String line = record.partition() + " " + record.offset() + " " + System.nanoTime() + "\n";
        try {
            journal.write(ByteBuffer.wrap(line.getBytes(StandardCharsets.US_ASCII)));
        } catch (IOException failure) {
            throw new UncheckedIOException(failure);
        }
        done.incrementAndGet();
    }

    private void sleep(ConsumerRecord<byte[], byte[]> record) throws InterruptedException {
        long now = System.nanoTime();
        firstStarted.compareAndSet(0, now);
        long before = lastStarted.getAndSet(now);
        if (before != 0) {
            longestPause.accumulateAndGet(now - before, Math::max);
        }
        Thread.sleep(pause);
        marks[record.partition()].incrementAndGet((int) record.offset());
        lastEnded.accumulateAndGet(System.nanoTime(), Math::max);
        done.incrementAndGet();
    }

    private void observe(ConsumerRecord<byte[], byte[]> record) throws InterruptedException {
        firstStarted.compareAndSet(0, System.nanoTime());
        peak.accumulateAndGet(running.incrementAndGet(), Math::max);
        int key = number(record.key());
        long following = record.offset() + 1;
        long before = turns.getAndSet(key, -following);
        if (before < 0 || before >= following) {
            disordered.incrementAndGet();
        }
        if (kind.equals("hash")) {
            hash(record.value());
        } else {
            Thread.sleep(number(record.value()));
        }
        turns.set(key, following);
        marks[record.partition()].incrementAndGet((int) record.offset());
        running.decrementAndGet();
        lastEnded.accumulateAndGet(System.nanoTime(), Math::max);
        done.incrementAndGet();
    }

    private static void hash(byte[] value) {
        try {
            MessageDigest digest = MessageDigest.getInstance("SHA-256");
            byte[] hashed = digest.digest(value);
            for (int round = 1; round < ROUNDS; round++) {
                digest.update(hashed);
                digest.digest(hashed, 0, hashed.length);
            }
        } catch (NoSuchAlgorithmException | DigestException failure) {
            throw new IllegalStateException(failure);
        }
    }

    private static int number(byte[] text) {
        int number = 0;
        for (int index = 0; index < DIGITS; index++) {
            number = number * 10 + text[index] - '0';
        }
        return number;
    }

    /** Returns the number of distinct records that ran. */
    int distinct() {
        int count = 0;
        for (AtomicIntegerArray partition : marks) {
            for (int offset = 0; offset < partition.length(); offset++) {
                count += partition.get(offset) > 0 ? 1 : 0;
            }
        }
        return count;
    }

    /** Returns the number of records that ran more than once. */
    int repeated() {
        int count = 0;
        for (AtomicIntegerArray partition : marks) {
            for (int offset = 0; offset < partition.length(); offset++) {
                count += partition.get(offset) > 1 ? 1 : 0;
            }
        }
        return count;
    }
}
