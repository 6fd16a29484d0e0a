import static io.confluent.parallelconsumer.ParallelConsumerOptions.CommitMode.PERIODIC_CONSUMER_ASYNCHRONOUS;
import static io.confluent.parallelconsumer.ParallelConsumerOptions.CommitMode.PERIODIC_TRANSACTIONAL_PRODUCER;
import static io.confluent.parallelconsumer.ParallelConsumerOptions.ProcessingOrder.KEY;

import com.sun.management.OperatingSystemMXBean;
import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Confluent's Parallel Consumer with its pool of threads, as its README shows it: reads a topic, and prints what it
 * measured as the contestants in Python do.
 */
public final class Contestant {
    private static final int LOOK_INTERVAL_MS = 20;
    private static final double STALL_SECONDS = 60;
    private static final double NEARLY_ALL = 0.99;

    /** One look at the clocks. */
    private record Reading(double wall, double cpu, int records) {}

    private final Told told;
    private final Work work;
    private final ParallelStreamProcessor<byte[], byte[]> consumer;
    private final List<Reading> readings = new ArrayList<>();

    private Contestant(Told told) throws IOException {
        this.told = told;
        this.work = new Work(told);
        var options = ParallelConsumerOptions.<byte[], byte[]>builder()
                .consumer(new KafkaConsumer<>(settings(told), new ByteArrayDeserializer(), new ByteArrayDeserializer()))
                .ordering(KEY)
                .commitMode(PERIODIC_CONSUMER_ASYNCHRONOUS)
                .commitInterval(Duration.ofSeconds(1))
                .maxConcurrency(told.number("concurrency"));
        if (publishes()) {
            Map<String, Object> producer =
                    Map.of("bootstrap.servers", told.text("bootstrap"), "transactional.id", told.text("group"));
            options.commitMode(PERIODIC_TRANSACTIONAL_PRODUCER)
                    .commitInterval(Duration.ofMillis(100))
                    .producer(new KafkaProducer<>(producer, new ByteArraySerializer(), new ByteArraySerializer()));
        }
        consumer = ParallelStreamProcessor.createEosStreamProcessor(options.build());
    }

    private boolean publishes() {
        return told.text("contestant").endsWith("transactions");
    }

    /** As aioshard tells its own client, and otherwise the defaults. */
    private static Map<String, Object> settings(Told told) {
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", told.text("bootstrap"));
        settings.put("group.id", told.text("group"));
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", false);
        settings.put("isolation.level", "read_committed");
        settings.put("fetch.max.wait.ms", 100);
        settings.put("fetch.max.bytes", 16 * 1024 * 1024);
        settings.put("max.partition.fetch.bytes", 1024 * 1024);
        if (told.text("contestant").endsWith("cooperative")) {
            settings.put("partition.assignment.strategy", CooperativeStickyAssignor.class.getName());
        }
        return settings;
    }

    public static void main(String[] arguments) {
        int code = 1;
        try {
            Told told = Told.by(arguments);
            if (told.text("work").equals("journal")) {
                new Contestant(told).runUntilTerminated();
            } else {
                Contestant first = null;
                if (!told.text("warm_up").isEmpty()) {
                    first = new Contestant(told.warmingUp());
                    first.runToTheEnd();
                }
                Contestant measured = new Contestant(told);
                measured.runToTheEnd();
                measured.answer(first == null ? measured : first);
            }
            code = 0;
        } catch (Exception failure) {
            failure.printStackTrace();
        }
        System.out.flush();
        System.err.flush();
        Runtime.getRuntime().halt(code);
    }

    private void start() {
        consumer.subscribe(List.of(told.text("topic")));
        if (publishes()) {
            consumer.pollAndProduce(context -> {
                var record = context.getSingleConsumerRecord();
                work.handle(record);
                return new ProducerRecord<>(told.text("output"), record.key(), record.value());
            });
        } else {
            consumer.poll(context -> work.handle(context.getSingleConsumerRecord()));
        }
    }

    private void runToTheEnd() throws Exception {
        start();
        Reading progress = look();
        for (Reading now = progress; now.records < told.number("records"); now = look()) {
            if (now.records > progress.records) {
                progress = now;
            } else if (now.wall - progress.wall > STALL_SECONDS) {
                throw new IllegalStateException(String.format(
                        "%s stopped at %d of %d records for %.0f s",
                        told.text("contestant"), now.records, told.number("records"), STALL_SECONDS));
            }
            check();
            Thread.sleep(LOOK_INTERVAL_MS);
        }
        consumer.closeDrainFirst();
    }

    private void check() {
        if (consumer.isClosedOrFailed()) {
            throw new IllegalStateException("Parallel Consumer has ended of itself");
        }
    }

    /** SIGTERM starts the hooks; what it leaves in its queues is processed before it closes. */
    private void runUntilTerminated() throws Exception {
        Thread ending = new Thread(() -> {
            consumer.closeDrainFirst();
            look();
            try {
                answer(this);
            } catch (IOException failure) {
                failure.printStackTrace();
                Runtime.getRuntime().halt(1);
            }
            System.out.flush();
            Runtime.getRuntime().halt(0);
        });
        look();
        start();
        Runtime.getRuntime().addShutdownHook(ending);
        while (true) {
            Thread.sleep(1_000);
            if (!ending.isAlive()) {
                check();
            }
        }
    }

    private Reading look() {
        var system = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        Reading reading =
                new Reading(System.nanoTime() / 1e9, system.getProcessCpuTime() / 1e9, work.done.get());
        readings.add(reading);
        return reading;
    }

    private void answer(Contestant first) throws IOException {
        Reading last = readings.get(readings.size() - 1);
        int records = told.number("records");
        int warm = told.text("warm_up").isEmpty() ? Math.max(records / 10, 1) : 1;
        Reading from = firstWith(warm);
        double started = work.firstStarted.get() / 1e9;
        boolean timed = work.lastEnded.get() > work.firstStarted.get();
        Map<String, Object> found = new HashMap<>();
        found.put("records", last.records);
        found.put("cpu_seconds", last.cpu - from.cpu);
        found.put("cpu_records", last.records - from.records);
        found.put("wall_seconds", timed ? work.lastEnded.get() / 1e9 - started : last.wall - from.wall);
        found.put("wall_records", timed ? last.records : last.records - from.records);
        found.put("repeated", work.repeated());
        found.put("missing", timed ? Math.max(records - work.distinct(), 0) : 0);
        found.put("rss", status("VmRSS:"));
        found.put("peak_rss", status("VmHWM:"));
        found.put("disordered", work.disordered.get());
        found.put("peak_concurrency", work.peak.get());
        found.put("longest_pause", work.longestPause.get() / 1e9);
        found.put("nearly_seconds", timed ? firstWith((int) Math.ceil(records * NEARLY_ALL)).wall - started : 0.0);
        found.put(
                "start_seconds",
                timed ? first.work.firstStarted.get() / 1e9 - told.seconds("spawned_at") : 0.0);
        List<String> members = new ArrayList<>();
        found.forEach((name, value) -> members.add(
                value instanceof Double number
                        ? String.format(Locale.ROOT, "\"%s\": %.9f", name, number)
                        : String.format(Locale.ROOT, "\"%s\": %s", name, value)));
        System.out.println("{" + String.join(", ", members) + "}");
    }

    private Reading firstWith(int records) {
        return readings.stream().filter(one -> one.records >= records).findFirst().orElse(readings.get(0));
    }

    /** Bytes. */
    private static long status(String name) throws IOException {
        for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
            if (line.startsWith(name)) {
                return Long.parseLong(line.replaceAll("\\D+", "")) * 1024;
            }
        }
        return 0;
    }
}
